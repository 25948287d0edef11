"""Third-party clients against `tandem serve`, each in its own environment."""

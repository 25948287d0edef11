"""The architectures that are served. Importing this costs no torch: configurations are checked without it."""

# Architecture, as config.json names it, to "module:class". A class is made from (config, dtype, device).
MODEL_CLASSES = {
    "LlamaForCausalLM": "tandem.engine.models.llama:LlamaModel",
}

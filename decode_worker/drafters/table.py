from typing import TYPE_CHECKING

from tandem.choices import Choices

if TYPE_CHECKING:
    from tandem.decode_worker.drafters.base import Drafter

DRAFTERS: "Choices[Drafter]" = Choices(
    "tandem.decode_worker.drafters.base:Drafter", {"ngram": "tandem.decode_worker.drafters.ngram:NgramDrafter"}
)

// On a phone the journal is above the tables, for the eye and for the Tab key.

import { byId } from "./dom.js";

const phone = matchMedia("(max-width: 760px)");
const journal = byId("journal-panel");
const place = journal.parentElement;

function arrange() {
  if (phone.matches) byId("topology-panel").before(journal);
  else place.append(journal);
}

phone.addEventListener("change", arrange);
arrange();

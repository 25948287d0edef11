// The description of the HTTP API, shown by Swagger UI. Calls from the page carry the key.

import { byId, setText } from "./dom.js";
import { askForKey, forgetKey, headers, storedKey } from "./key.js";
import { refusal } from "./stream.js";

async function description() {
  for (;;) {
    const response = await fetch("openapi.json", { headers: headers(), cache: "no-store" });
    if (response.ok) return response.json();
    if (response.status !== 401) throw new Error(await refusal(response));
    const wrong = storedKey() !== null;
    forgetKey();
    await askForKey(wrong ? "That key is not known here. Try another one." : "");
  }
}

function withKey(request) {
  // Only this server may see the key.
  if (new URL(request.url, document.baseURI).origin === location.origin) Object.assign(request.headers, headers());
  return request;
}

async function show() {
  try {
    const spec = await description();
    window.SwaggerUIBundle({
      spec,
      domNode: byId("api"),
      deepLinking: true,
      docExpansion: "list",
      defaultModelsExpandDepth: 0,
      validatorUrl: null,
      // The command line shown for a call has no key.
      showMutatedRequest: false,
      requestInterceptor: withKey,
    });
  } catch (error) {
    setText(byId("notice"), `The description of the API cannot be shown: ${error.message}.`);
    byId("notice").hidden = false;
  }
}

byId("forget").addEventListener("click", () => {
  forgetKey();
  location.reload();
});
show();

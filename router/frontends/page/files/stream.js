// Server-sent events over fetch: EventSource cannot send a key.

export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      rest += value;
      const lines = rest.split("\n");
      rest = lines.pop();
      for (const line of lines) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// The server's error message.
export async function refusal(response) {
  try {
    return (await response.json()).error.message;
  } catch {
    return `the server answers ${response.status}`;
  }
}

// Talks to the server: JSON and server-sent events.

export class ServerError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

function headers(key) {
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function refusal(response) {
  let message = `the server answered ${response.status}`;
  try {
    message = (await response.json()).error.message;
  } catch {
    // no JSON: the number has to do
  }
  return new ServerError(response.status, message);
}

export async function modelName(key) {
  const response = await fetch("v1/models", { headers: headers(key) });
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data[0].id;
}

// Yields the chunks of a reply. Throws ServerError, TypeError without a connection, AbortError once `signal` says so.
export async function* chunks(body, key, signal) {
  const asked = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const response = await fetch("v1/chat/completions", asked);
  if (!response.ok) throw await refusal(response);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new ServerError(0, "the reply broke off");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ")) continue;
      const data = line.slice(6);
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(500, chunk.error.message);
      yield chunk;
    }
  }
}

// Requests that a client left in the middle: the server aborts them.
import assert from "node:assert";

const aborted = async () => {
  const headers = { authorization: `Bearer ${process.env.OPENAI_API_KEY}` };
  const text = await (await fetch(`${process.env.MINISGL_URL}/metrics`, { headers })).text();
  return Number(text.match(/^minisgl:request_success_total\{finished_reason="abort".*\} (\S+)$/m)[1]);
};

/** Wait until the server has aborted so many requests. */
export const waitForAborts = async (count) => {
  for (let wait = 0; (await aborted()) < count; wait++) {
    assert.ok(wait < 300, `the server did not abort ${count} requests`);
    await new Promise((resolve) => setTimeout(resolve, 100));
  }
};

// What OpenAI's client for JavaScript makes of a server: node client.mjs URL SCENE prints one JSON object in the end.
import OpenAI from "openai";

const [url, scene] = process.argv.slice(2);
const model = "tiny";
const messages = [{ role: "user", content: "Who?" }];
const endless = { model, prompt: "Stop", max_tokens: 4000, stream: true };
const client = (maxRetries = 0, apiKey = "any") => new OpenAI({ baseURL: `${url}/v1`, apiKey, maxRetries });

async function failure(work) {
  try {
    await work;
  } catch (error) {
    return { name: error.constructor.name, status: error.status ?? null, code: error.code ?? null, param: error.param ?? null };
  }
  return null;
}

async function begun(openai) {
  const stream = await openai.completions.create(endless);
  const pieces = stream[Symbol.asyncIterator]();
  await pieces.next();
  console.log("begun");
  return { stream, pieces };
}

const scenes = {
  async answers() {
    const openai = client();
    const whole = await openai.chat.completions.create({ model, messages, max_tokens: 12 });
    const text = await openai.completions.create({ model, prompt: "Hello", max_tokens: 12, n: 2, temperature: 1, seed: 3 });
    const options = { stream: true, stream_options: { include_usage: true } };
    const pieces = [];
    let usage = null;
    for await (const chunk of await openai.chat.completions.create({ model, messages, max_tokens: 12, ...options })) {
      pieces.push(chunk.choices[0]?.delta.content ?? "");
      usage = chunk.usage ?? usage;
    }
    const models = (await openai.models.list()).data.map((each) => each.id);
    return {
      chat: whole.choices[0].message.content, streamed: pieces.join(""), models,
      texts: text.choices.map((choice) => choice.text), usage: whole.usage, streamed_usage: usage,
    };
  },
  async errors() {
    const openai = client();
    const chat = (fields) => failure(openai.chat.completions.create({ model, messages, ...fields }));
    return {
      field: await chat({ temprature: 1 }), value: await chat({ n: 99 }), model: await chat({ model: "gpt-5" }),
      long: await chat({ messages: [{ role: "user", content: "a ".repeat(5000) }] }),
      large: await chat({ messages: [{ role: "user", content: "a".repeat(17 << 20) }] }),
      stream: await chat({ stream: true, tools: [{ type: "function", function: { name: "f" } }] }),
    };
  },
  async key() {
    return { wrong: await failure(client().models.list()), right: (await client(0, "secret").models.list()).data.length };
  },
  async busy() {
    const flood = (retries) => Promise.all(Array.from({ length: 24 }, (_, number) =>
      failure(client(retries).completions.create({ model, prompt: `Hello ${number}`, max_tokens: 200 }))));
    const refused = (await flood(0)).filter((each) => each !== null);
    return { refused: refused[0], count: refused.length, without_limit: (await flood(20)).filter((each) => each !== null) };
  },
  async down() {
    const hasty = await failure(client().completions.create({ model, prompt: "Hello", max_tokens: 4 }));
    const answer = await client(30).completions.create({ model, prompt: "Hello", max_tokens: 4 });
    return { hasty, text: answer.choices[0].text };
  },
  async abort() {
    const { stream } = await begun(client());
    stream.controller.abort();
    return {};
  },
  async lost() {
    const { pieces } = await begun(client());
    const rest = async () => { while (!(await pieces.next()).done); };
    return { error: await failure(rest()) };
  },
};

console.log(JSON.stringify(await scenes[scene]()));

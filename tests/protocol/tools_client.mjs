// What the AI SDK makes of a server: node tools_client.mjs URL CLIENT, as tools_client.py.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, jsonSchema, stepCountIs, streamText, tool } from "ai";

const [url, client] = process.argv.slice(2);
const provider = createOpenAICompatible({ name: "kvsift", baseURL: `${url}/v1`, apiKey: "any", supportsStructuredOutputs: true });
const schema = jsonSchema({ type: "object", properties: { city: { type: "string" } }, required: ["city"], additionalProperties: false });
const weather = tool({ description: "Look it up.", inputSchema: schema, execute: async ({ city }) => `rain in ${city}` });
const asked = { model: provider("tiny"), prompt: "What is the weather?", maxRetries: 0 };

const clients = {
  async ai_sdk() {
    return (await generateText({ ...asked, tools: { weather }, stopWhen: stepCountIs(2) })).text;
  },
  async ai_sdk_streamed() {
    return await streamText({ ...asked, tools: { weather }, stopWhen: stepCountIs(2) }).text;
  },
  async ai_sdk_schema() {
    return (await generateObject({ ...asked, schema })).object.city;
  },
};

console.log(await clients[client]());

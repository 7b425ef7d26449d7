// An agent with Vercel's AI SDK (https://ai-sdk.dev). The third argument is the question, and the program prints the answer.
// In the last step the agent offers no tools (`activeTools`), so that the model must answer.

import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const inputSchema = z.object({ a: z.number(), b: z.number() });
const tools = {
  add: tool({ inputSchema, execute: async ({ a, b }) => String(a + b) }),
  multiply: tool({ inputSchema, execute: async ({ a, b }) => String(a * b) }),
};
const [baseURL, apiKey, prompt] = process.argv.slice(2);
const { text } = await generateText({
  model: createOpenAI({ baseURL, apiKey })("default"), // the protocol is Responses
  prompt,
  tools,
  stopWhen: stepCountIs(3),
  prepareStep: ({ stepNumber }) => (stepNumber < 2 ? {} : { activeTools: [] }),
  maxRetries: 0,
});
console.log(text);

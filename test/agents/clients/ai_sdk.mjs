// AI SDK, with the models of three packages: OpenAI's default, which are responses,
// compatible ones, and Anthropic's. It takes jobs and reports as common.py does.

import { createRequire } from "node:module";
import { dirname, join } from "node:path";
import { createInterface } from "node:readline";
import { fileURLToPath } from "node:url";

const here = dirname(fileURLToPath(import.meta.url));
const require = createRequire(join(here, "../../../.agents/ai_sdk/package.json"));
const { generateText, streamText, Output, stepCountIs, tool } = require("ai");
const { z } = require("zod");

// The output is for reports.
console.log = console.info = console.error;

const DEGREES = { Rome: 21, Oslo: 7 };
const Weather = z.object({ city: z.string(), degrees: z.number().int() });

function modelOf(job) {
  const kind = process.argv[2];
  if (kind === "anthropic") {
    const { createAnthropic } = require("@ai-sdk/anthropic");
    return createAnthropic({ baseURL: job.base_url, apiKey: job.key })("policy");
  }
  if (kind === "compatible") {
    const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
    const given = { name: "gateway", baseURL: job.base_url, apiKey: job.key };
    return createOpenAICompatible({ ...given, supportsStructuredOutputs: true })("policy");
  }
  const { createOpenAI } = require("@ai-sdk/openai");
  return createOpenAI({ baseURL: job.base_url, apiKey: job.key })("policy");
}

async function run(job, called) {
  const getWeather = tool({
    description: "Returns the weather of a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => {
      called.push(city);
      return `It is ${DEGREES[city]} degrees in ${city}.`;
    },
  });
  const messages = [];
  let answer = null;
  for (const content of job.messages) {
    messages.push({ role: "user", content });
    const asked = { model: modelOf(job), messages, stopWhen: stepCountIs(5) };
    if (job.retries !== undefined) asked.maxRetries = job.retries;
    // A time-out of AI SDK is one of all of its attempts; this is one of each.
    if (job.retries === 0) asked.abortSignal = AbortSignal.timeout(1000 * job.timeout);
    if (job.structured) {
      const said = await generateText({ ...asked, output: Output.object({ schema: Weather }) });
      return said.output;
    }
    asked.tools = { get_weather: getWeather };
    let said;
    if (job.stream) {
      let failure = null;
      said = streamText({ ...asked, onError: ({ error }) => (failure = error) });
      await said.consumeStream();
      if (failure) throw failure;
    } else {
      said = await generateText(asked);
    }
    messages.push(...(await said.response).messages);
    answer = await said.text;
  }
  return answer;
}

for await (const line of createInterface({ input: process.stdin })) {
  const called = [];
  let report = { answer: null, error: null, called };
  try {
    report.answer = await run(JSON.parse(line), called);
  } catch (error) {
    console.error(error);
    const errors = [error?.name, error?.lastError?.name, error?.cause?.name];
    report = { ...report, error: error?.name ?? String(error), errors, message: error?.message };
  }
  process.stdout.write(JSON.stringify(report) + "\n");
}

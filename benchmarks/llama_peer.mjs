// llama.cpp on the processor, asked what `local.py` asks of W1 and W2: node llama_peer.mjs FOLDER MODEL.gguf WORKLOADS.json
// FOLDER is where `npm install --ignore-scripts node-llama-cpp` ran: the package brings llama.cpp built. 32 sequences share
// each batch, and each keeps what its next prompt has in common with the one before.
import fs from "node:fs";
import path from "node:path";
import {pathToFileURL} from "node:url";

const [folder, gguf, asked] = process.argv.slice(2);
const {getLlama, LlamaCompletion} = await import(pathToFileURL(path.resolve(folder, "node_modules/node-llama-cpp/dist/index.js")));
const llama = await getLlama({gpu: false, build: "never", logLevel: "error", maxThreads: 2});
const model = await llama.loadModel({modelPath: gguf});
const context = await model.createContext({sequences: 32, contextSize: 1200, batchSize: 512, threads: 2});
const sequences = Array.from({length: 32}, () => context.getSequence());

for (const {name, prompts, n = 1, max_tokens, temperature, stop = []} of JSON.parse(fs.readFileSync(asked))) {
    const jobs = prompts.flatMap((text) => Array(n).fill(model.tokenize(text, true)));
    let count = 0;
    const work = async (sequence) => {
        const completion = new LlamaCompletion({contextSequence: sequence, autoDisposeSequence: false});
        while (jobs.length) {
            await completion.generateCompletion(jobs.shift(), {
                maxTokens: max_tokens, temperature, customStopTriggers: stop, seed: jobs.length,
                onToken: (tokens) => { count += tokens.length; },
            });
        }
        completion.dispose();
    };
    const start = performance.now();
    await Promise.all(sequences.map(work));
    console.log(JSON.stringify({name, rate: count / (performance.now() - start) * 1e3}));
}
process.exit(0);

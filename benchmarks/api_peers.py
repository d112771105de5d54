"""One round of a peer of `api.py`, in an environment that needs nothing of ours.

Run as `python api_peers.py client url requests window`; prints requests a second and milliseconds of processor time for each.
"""

import asyncio
import sys
import time


async def openai_client(url, prompts, window, http_client=None):
    """openai-python's async client, as its documentation shows it."""
    import openai

    limit = asyncio.Semaphore(window)
    async with openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0, http_client=http_client) as client:

        async def one(prompt):
            async with limit:
                answer = await client.chat.completions.create(model="m", messages=[{"role": "user", "content": prompt}])
            return answer.choices[0].message.content

        return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def openai_aiohttp(url, prompts, window):
    """The same over aiohttp."""
    import openai

    return await openai_client(url, prompts, window, openai.DefaultAioHttpClient())


async def litellm_client(url, prompts, window):
    """litellm's `acompletion`."""
    import litellm

    limit = asyncio.Semaphore(window)

    async def one(prompt):
        async with limit:
            answer = await litellm.acompletion(
                "openai/m", [{"role": "user", "content": prompt}], api_base=url, api_key="none", max_retries=0
            )
        return answer.choices[0].message.content

    return await asyncio.gather(*(one(prompt) for prompt in prompts))


async def langchain(url, prompts, window):
    """LangChain's `abatch`."""
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="m", base_url=url, api_key="none", max_retries=0)
    answers = await model.abatch(prompts, config={"max_concurrency": window})
    return [answer.content for answer in answers]


CLIENTS = {
    "openai, httpx": openai_client,
    "openai, aiohttp": openai_aiohttp,
    "litellm": litellm_client,
    "LangChain": langchain,
}


async def round_of(ask, url, requests, window):
    """Requests a second and milliseconds of processor time for each, once all is imported and connected."""
    await ask(url, ["warm up"], 1)
    wall, processor = time.perf_counter(), time.process_time()
    texts = await ask(url, [f"prompt {i}" for i in range(requests)], window)
    assert all(texts)
    return requests / (time.perf_counter() - wall), (time.process_time() - processor) / requests * 1e3


if __name__ == "__main__":
    client, url, requests, window = sys.argv[1:]
    print(*asyncio.run(round_of(CLIENTS[client], url, int(requests), int(window))))

"""Images fetched by your own HTTP client and described at the same time, as JSON by a schema.

python examples/describe_images.py gpt-4o-mini https://example.org/one.jpg https://example.org/two.jpg
"""

import asyncio
import sys
from dataclasses import dataclass

import aiohttp

import outlines_like as ol


@dataclass
class Description:
    """What is to be known of an image."""

    subject: str
    colors: list[str]
    people: int


@ol.program
async def describe(lm, client, url):
    """Fetch an image, then ask about it. It runs in your loop, where your client lives."""
    async with client.get(url) as response:
        picture = await response.read()
    with ol.system():
        lm += "You describe images in JSON."
    with ol.user():
        lm += "Describe this image:"
        lm += ol.image(picture)
    with ol.assistant():
        lm += ol.json("description", schema=Description, temperature=0)
    return lm


async def main(model, urls):
    async with aiohttp.ClientSession() as client:
        lms = await model.async_run_batched([describe(client, url) for url in urls])
    for url, lm in zip(urls, lms, strict=True):
        print(url.rpartition("/")[2], lm["description"])
    return lms


if __name__ == "__main__":
    asyncio.run(main(ol.models.openai(sys.argv[1]), sys.argv[2:]))

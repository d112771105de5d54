"""The main job on every backend: the fake, SmolLM2 in a worker, and SmolLM2 behind a real server."""

import numpy as np
import pytest

import outlines_like as ol

WORDS = ["Name a color.", "Say hello.", "Name an animal.", "Count to three.", "Name a city.", "Say goodbye."]
SHAPES = [(), (0,), (1,), (1, 3), (2, 3)]


@pytest.fixture(params=["fake", "smollm2", "server"])
def model(request):
    """Each backend with a greedy answer of a few tokens."""
    if request.param == "fake":
        return ol.models.fake(lambda asked: f"{asked.text} {asked.sample}")
    if request.param == "smollm2":
        request.getfixturevalue("smollm2")
        return ol.models.transformers("smollm2-135m", deterministic=True)
    base_url, name = request.getfixturevalue("serve")
    return ol.models.openai(name, base_url=base_url, concurrency=2)


def prompts_of(shape):
    """Different prompts in ``shape``; plain text for ()."""
    array = np.empty(shape, dtype=object)
    for k, index in enumerate(np.ndindex(*shape)):
        array[index] = WORDS[k % len(WORDS)]
    return array if shape else WORDS[0]


def test_every_shape_and_number_of_samples_holds_its_own_answers(model):
    """Cell by cell, the answer is the one that the prompt gets alone; a second run asks nothing and gives the same."""
    greedy = {"temperature": 0, "max_tokens": 4}
    alone = {word: model(word, **greedy) for word in WORDS}
    assert len(set(alone.values())) > 3
    for shape in SHAPES:
        prompts = prompts_of(shape)
        for samples in (None, 1, 4):
            answers = model(prompts, samples=samples, **greedy)
            wanted = np.vectorize(alone.get, otypes=[object])(prompts) if np.size(prompts) else np.empty(shape, object)
            wanted = wanted if samples is None else np.repeat(np.asarray(wanted, object)[..., None], samples, axis=-1)
            assert np.shape(answers) == np.shape(wanted)
            assert np.array_equal(np.asarray(answers, object), np.asarray(wanted, object))
            assert model.plan(prompts, samples=samples, **greedy).calls == 0


def test_draws_are_kept_each_in_its_place(model):
    """Eight samples after five pay for three; a rerun gives all eight again."""
    drawn = {"temperature": 1.0, "max_tokens": 5}
    five = model(WORDS[:2], samples=5, **drawn)
    assert model.plan(WORDS[:2], samples=8, **drawn)[:3] == (16, 10, 16)
    eight = model.complete(WORDS[:2], samples=8, **drawn)
    cached = np.vectorize(lambda completion: completion.cached)(eight)
    assert cached.tolist() == [[True] * 5 + [False] * 3] * 2
    texts = ol.vectorize(lambda completion: completion.text)(eight)
    assert (texts[:, :5] == five).all()
    assert (model(WORDS[:2], samples=8, **drawn) == texts).all()
    if "http" not in model.endpoint:  # `transformers serve` is greedy whatever it is asked
        assert len(set(texts.flat)) > 8


def test_streamed_texts_grow_into_the_eager_answers(model):
    """The last snapshot of each row is the answer, and what was shown before is its beginning."""
    greedy = {"temperature": 0, "max_tokens": 6}
    with ol.cache.disabled():
        eager = model(WORDS[:3], **greedy)
        seen = {(0,): [], (1,): [], (2,): []}
        for index, text, done in model.stream(WORDS[:3], **greedy):
            seen[index].append((text, done))
    for (row,), snapshots in seen.items():
        assert [done for _, done in snapshots] == [False] * (len(snapshots) - 1) + [True]
        assert snapshots[-1][0] == eager[row]
        assert all(eager[row].startswith(text) for text, _ in snapshots)


def test_the_server_answers_as_the_local_model_does(smollm2, serve):
    """The same weights, greedily, through HTTP and through a worker."""
    base_url, name = serve
    server = ol.models.openai(name, base_url=base_url, concurrency=2)
    greedy = {"temperature": 0, "max_tokens": 12}
    assert server(WORDS, **greedy).tolist() == smollm2(WORDS, **greedy).tolist()

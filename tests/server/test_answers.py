"""Answers in OpenAI's form, whole and in pieces."""

import json

import pytest
from server.fake_worker import USAGE
from server.test_schemas import chat, completion

from kvsift.server.answers import AnswerForm, event
from kvsift.server.api_errors import ApiError
from kvsift.server.frames import AnswerRequest
from kvsift.server.jobs import ServerJob


def job_of() -> ServerJob:
    """A request that a step has begun and another has ended."""
    job = ServerJob(1, AnswerRequest())
    job.accept([3])
    job.add({"index": 0, "prefilled": 3, "tokens": [[5, "Grüß", [["Grüß", list("Grüß".encode()), -0.5, 0, [GRUESS]]]]]})
    return job


GRUESS = ["Grüß", list("Grüß".encode()), -0.5, 5]

GOTT = [[" Gott", list(b" Gott"), -1.0, 4, [["!", [33], -0.9, 7], ["!", [33], -1.5, 8]]]]

END = {"index": 0, "tokens": [[6, " Gott", GOTT]], "finish": "length", "usage": USAGE}


def test_the_transcript_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvsift.server.answers.time", lambda: 1_700_000_000)
    form = AnswerForm(chat(stream=True, stream_options={"include_usage": True}), "tiny")
    form._id = "chatcmpl-1"
    job = job_of()
    data = form.chunks(job)
    job.add(END)
    data += form.chunks(job) + form.last(job)
    head = (
        'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"tiny",'
        '"system_fingerprint":"kvsift-0.1.0","choices":['
    )
    assert data.decode() == (
        head + '{"index":0,"delta":{"role":"assistant","content":"Gr\\u00fc\\u00df"},"logprobs":null,'
        '"finish_reason":null}],"usage":null}\n\n'
        + head + '{"index":0,"delta":{"content":" Gott"},"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
        + head + '{"index":0,"delta":{},"logprobs":null,"finish_reason":"length"}],"usage":null}\n\n'
        + head + '],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5,"prompt_tokens_details":'
        '{"cached_tokens":0},"sparsity":{"plan":"dense","density":1.0,"visible_tokens":4.0,"recovery":null,'
        '"bytes_read":8,"bytes_dense":8,"guard_events":0,"reuse":{"cached_tokens":0,"why_not":null}}}}\n\n'
        "data: [DONE]\n\n"
    )  # fmt: skip


def test_every_event_has_the_tokens_so_far_if_guidellm_asks_for_them() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    form, job = AnswerForm(completion(stream=True, stream_options=options), "tiny"), job_of()
    data = form.chunks(job)
    job.add(END)
    data += form.chunks(job) + form.last(job)
    usages = [json.loads(line[6:])["usage"] for line in data.decode().split("\n\n")[:-2]]
    counts = [(usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) for usage in usages]
    assert counts == [(3, 1, 4), (3, 2, 5), (3, 2, 5), (3, 2, 5)]
    assert ["sparsity" in usage for usage in usages] == [False, False, False, True]


def test_the_transcript_of_two_samples_that_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """One has ended, the other has begun; no usage is asked for."""
    monkeypatch.setattr("kvsift.server.answers.time", lambda: 1_700_000_000)
    form, job = (
        AnswerForm(completion(stream=True, n=2, temperature=1.0), "tiny"),
        ServerJob(1, AnswerRequest(num_samples=2)),
    )
    form._id = "cmpl-1"
    job.accept([3])
    job.add({"index": 1, "prefilled": 3, "tokens": [[5, "one", None]], "finish": "stop", "usage": USAGE})
    job.add({"index": 0, "tokens": [[6, "two", None]]})
    data = form.chunks(job)
    job.fail(ApiError(500, "lost.", "engine_lost"))
    assert job.error is not None
    data += form.chunks(job) + event(job.error.as_dict())
    head = (
        'data: {"id":"cmpl-1","object":"text_completion","created":1700000000,"model":"tiny",'
        '"system_fingerprint":"kvsift-0.1.0","choices":['
    )
    assert data.decode() == (
        head + '{"index":0,"text":"two","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"index":1,"text":"one","logprobs":null,"finish_reason":null}]}\n\n'
        + head + '{"index":1,"text":"","logprobs":null,"finish_reason":"stop"}]}\n\n'
        'data: {"error":{"message":"lost.","type":"server_error","param":null,"code":"engine_lost"}}\n\n'
    )  # fmt: skip


def test_logprobs_in_both_forms() -> None:
    job = job_of()
    job.add(END)
    [choice] = AnswerForm(completion(logprobs=1), "tiny").whole(job)["choices"]
    assert choice["logprobs"] == {
        "tokens": ["Grüß", " Gott"],
        "token_logprobs": [-0.5, -1.0],
        "top_logprobs": [{"Grüß": -0.5}, {"!": -0.9, "token_id:8": -1.5}],
        "text_offset": [0, 4],
    }
    job = job_of()
    job.add(END)
    [choice] = AnswerForm(chat(logprobs=True, top_logprobs=1), "tiny").whole(job)["choices"]
    assert choice["logprobs"]["content"][1] == {
        "token": " Gott", "logprob": -1.0, "bytes": list(b" Gott"),
        "top_logprobs": [{"token": "!", "logprob": value, "bytes": [33]} for value in (-0.9, -1.5)],
    }  # fmt: skip


def test_text_that_nobody_takes_is_one_piece() -> None:
    job = job_of()
    for token in range(1000):
        job.add({"index": 0, "tokens": [[token, "x", None]]})
    [piece] = job.take()
    assert piece.text == "Grüß" + "x" * 1000
    assert job.take() == []


def test_a_job_is_submitted_again_with_what_was_sent() -> None:
    request = AnswerRequest(prompts=["a"], num_samples=2)
    job = ServerJob(7, request)
    job.add({"index": 0, "tokens": [[5, "a", None], [None, "", None]], "finish": "stop", "usage": USAGE})
    job.add({"index": 1, "tokens": [[6, "b", None]]})
    resumed = {"request": vars(request), "sent": {0: [5], 1: [6]}, "ended": [0]}
    assert job.message() == {"op": "submit", "id": 7, **resumed}

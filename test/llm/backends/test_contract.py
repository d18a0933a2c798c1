"""An engine that somebody else brings is told what it lacks."""

from __future__ import annotations

import pytest

from torchrl_sglang import RLSGLangEngine

ABSTRACT = sorted(RLSGLangEngine.__abstractmethods__)


def complete(**changed):
    methods = {name: lambda self, *args, **kwargs: None for name in ABSTRACT}
    return type("Engine", (RLSGLangEngine,), methods | changed)


def test_an_engine_that_lacks_a_method_is_not_made():
    for name in ABSTRACT:
        with pytest.raises(TypeError, match=name):
            complete(**{name: getattr(RLSGLangEngine, name)})()


def test_an_engine_generates_with_one_method():
    """``generate`` makes the requests of the arguments, and is not abstract."""
    seen = []

    def generate_requests(self, requests, **options):
        seen.extend(requests)
        return [None for _ in requests]

    engine = complete(generate_requests=generate_requests)()
    assert engine.generate(input_ids=[[1, 2], [3]], max_tokens=4) == [None, None]
    assert [request.input_ids for request in seen] == [[1, 2], [3]]
    assert len(ABSTRACT) > 25

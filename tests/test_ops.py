"""What every op promises: documented arguments, a common signature, a reference of its name."""

from __future__ import annotations

import inspect
import re

import pytest

from cufuse import ops, reference

NAMES = [name for name in ops.__all__ if name != "Norm"]
# Made of others in the reference: `rmsnorm(residual=...)`, linear and then rope_append.
COMPOSED = {"add_rmsnorm", "add_layernorm", "qkv_rope_append"}


@pytest.mark.parametrize("name", NAMES)
def test_an_op_documents_itself(name):
    op = getattr(ops, name)
    text = inspect.getdoc(op)
    first = text.split("\n\n")[0]
    assert re.match(r"[A-Z][a-z]+ .*[.)*]\S*$", first, re.DOTALL), first
    for argument in inspect.signature(op).parameters:
        if argument != "stream":
            assert re.search(rf"\b{argument}\b", text), f"{name} does not say what {argument} is"
    assert "Raises" in text
    assert "Returns" in text or inspect.signature(op).return_annotation == "None"


@pytest.mark.parametrize("name", NAMES)
def test_options_and_outputs_of_an_op_are_named(name):
    parameters = inspect.signature(getattr(ops, name)).parameters
    for wanted in ("out", "stream") if name != "append" else ("stream",):
        assert parameters[wanted].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[wanted].default is None


@pytest.mark.parametrize("name", sorted(set(NAMES) - COMPOSED))
def test_an_op_has_a_reference_of_its_name(name):
    assert callable(getattr(reference, name))

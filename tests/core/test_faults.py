"""No check of a file or an option speaks with pydantic's own words."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from mesh_tf_core.faults import at_path, fault_text


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid")
    kind: Literal["part"]


class Other(BaseModel):
    kind: Literal["other"]


class Colour(StrEnum):
    RED = "red"
    BLUE = "blue"


Either = Annotated[Part | Other, Field(discriminator="kind")]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        (int, "x", "must be a whole number"),
        (int, 1.5, "must be a whole number"),
        (float, "x", "must be a number"),
        (bool, "x", "must be true or false"),
        (str, 3, "must be text"),
        (dict[str, int], 3, "must be a JSON object"),
        (list[int], 3, "must be a list"),
        (tuple[int, ...], 3, "must be a list"),
        (Part, 3, "must be a JSON object"),
        (Part, {}, "is missing"),
        (Part, {"kind": "part", "b": 1}, "is not a known field; remove it, or correct its name"),
        (Part, {"kind": "other"}, "must be 'part'"),
        (Colour, "green", "must be 'red' or 'blue'"),
        (Either, {"kind": "third"}, "must have a kind of 'part', 'other', found 'third'"),
        (Either, {}, "has no field 'kind'"),
        (Annotated[int, Field(ge=1)], 0, "must be at least 1"),
        (Annotated[int, Field(gt=1)], 0, "must be above 1"),
        (Annotated[int, Field(le=1)], 2, "must be at most 1"),
        (Annotated[int, Field(lt=1)], 2, "must be below 1"),
        (Annotated[float, Field(allow_inf_nan=False)], float("nan"), "must be a finite number"),
        (Annotated[str, Field(min_length=1)], "", "must not be empty"),
        (Annotated[str, Field(pattern="^a$")], "b", "must match the pattern ^a$"),
        (Annotated[list[int], Field(min_length=2)], [1], "must have at least 2 entries, found 1"),
        (tuple[int, int], [1, 2, 3], "must have at most 2 entries, found 3"),
    ],
)
def test_faults_are_in_plain_words(kind: Any, value: Any, said: str) -> None:
    with pytest.raises(ValidationError) as error:
        TypeAdapter(kind).validate_python(value)
    assert fault_text(error.value.errors()[0]["msg"]) == said


def test_a_path_is_the_subject_unless_the_message_has_its_own() -> None:
    assert at_path("chip", "Field required") == "chip is missing"
    assert at_path("chip", "Value error, memory must be\n positive") == "chip: memory must be positive"

"""Compiler profiles: how a program falls into kernels, by the software that compiles or runs it.

A profile is a class; each rule is a method of the class that it is true of (`base` lists the questions). A
hardware file names its profile (`compiler`); another one may be put in its place by name
(`dataclasses.replace(hardware, compiler="eager")`).
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from costmodels.hardware import Hardware
from costmodels.pricing.compilers.base import Compiler
from costmodels.pricing.compilers.launched import BY_HOSTS
from costmodels.pricing.compilers.local import LocalEngine
from costmodels.pricing.compilers.xla import Xla, XlaCpu, XlaGpu, XlaTpu

__all__ = ["COMPILERS", "Compiler", "compiler_of"]

COMPILERS: Mapping[str, type[Compiler]] = MappingProxyType(
    {c.name: c for c in (Compiler, Xla, XlaTpu, XlaGpu, XlaCpu, *BY_HOSTS, LocalEngine)}
)
"""Every profile by its name."""


def compiler_of(hardware: Hardware) -> Compiler:
    """The profile that a machine's programs are priced by."""
    held = tuple((name, number.value) for name, number in hardware.holds)
    return replace(COMPILERS[hardware.compiler].of(hardware), holds=held)

"""What pyproject.toml cannot say: the package brings the examples, for `layoutopt init --example`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = "examples"


class WithExamples(build_py):
    """Copies `examples/*.py` to `layoutopt/examples`; an editable install has them where they are."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        home = Path(self.build_lib, "layoutopt", EXAMPLES)
        self.mkpath(str(home))
        for file in self._examples():
            self.copy_file(file, str(home / Path(file).name))

    def get_source_files(self):
        return [*super().get_source_files(), *self._examples()]

    @staticmethod
    def _examples():
        return sorted(str(file) for file in Path(EXAMPLES).glob("*.py"))


setup(cmdclass={"build_py": WithExamples})

"""What pyproject.toml cannot say: the package brings the examples, for `layoutopt init --example`."""

from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

EXAMPLES = "examples"


class WithExamples(build_py):
    """Copies examples and starters to `layoutopt/examples`; an editable install has them in place."""

    def run(self):
        super().run()
        if self.editable_mode:
            return
        home = Path(self.build_lib, "layoutopt")
        self.mkpath(str(home / EXAMPLES / "starters"))
        for file in self._examples():
            self.copy_file(file, str(home / file))

    def get_source_files(self):
        return [*super().get_source_files(), *self._examples()]

    @staticmethod
    def _examples():
        return sorted(
            str(file) for folder in (EXAMPLES, f"{EXAMPLES}/starters") for file in Path(folder).glob("*.py")
        )


setup(cmdclass={"build_py": WithExamples})

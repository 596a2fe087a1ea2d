"""Adds the start-up `.pth` line to the package; setuptools has no declarative way for it."""

from pathlib import Path
from shutil import copyfile

from setuptools import setup
from setuptools.command.build_py import build_py

PTH = "moe_trm_sglang_cpu.pth"


class BuildWithPth(build_py):
    """`build_py` that also places the `.pth` file at the root of the wheel."""

    def run(self) -> None:
        super().run()
        copyfile(Path(__file__).parent / PTH, Path(self.build_lib) / PTH)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        return [*super().get_outputs(include_bytecode), str(Path(self.build_lib) / PTH)]


setup(cmdclass={"build_py": BuildWithPth})

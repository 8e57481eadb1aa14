"""Reads the environment: which launcher started this process."""

from collections.abc import Mapping


def launcher(environ: Mapping[str, str]) -> tuple[str, str]:
    """Return the launcher's name and the variable that shows it. If one launcher has started
    another, return the inner one: for torchrun under srun, torchrun."""
    signs = {
        "torchrun": ("TORCHELASTIC_RUN_ID",),
        "srun": ("SLURM_STEP_ID",),
        "mpiexec": ("PMI_FD", "PMI_PORT", "PMI_RANK", "PMIX_RANK"),
        "by hand": ("RANK",),
    }
    for name, variables in signs.items():
        for variable in variables:
            if variable in environ:
                return name, variable
    return "none", "no launcher's variables are set"

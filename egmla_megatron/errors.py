"""The exceptions that mean: the user can mend this."""


class UserError(Exception):
    """A mistake in configuration, data or command line.

    Mains print it as one line `error: ...` on stderr and exit with 2, without a traceback. The message
    says what, got, allowed and how to fix.
    """

    exit_code = 2


class MachineError(UserError):
    """A fault of one machine, which another machine or another try may not have: exit code 1, after which a job under
    Slurm starts again.
    """

    exit_code = 1

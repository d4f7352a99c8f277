"""The one exception that means: the user can mend this."""


class UserError(Exception):
    """A mistake in configuration, data or command line.

    Mains print it as one line `error: ...` on stderr and exit with 2, without a traceback. The message
    says what, got, allowed and how to fix.
    """

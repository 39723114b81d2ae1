"""One module a command of `kvbraid`: add_arguments(parser) and run(arguments) -> exit code."""

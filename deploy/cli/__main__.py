"""`python -m deploy.cli`, where the command is not installed."""

from deploy.cli import main

main()

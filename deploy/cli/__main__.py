"""`python -m deploy.cli`, for a place without the command."""

from deploy.cli import main

main()

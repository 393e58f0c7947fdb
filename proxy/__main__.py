"""`python -m proxy` is the console command."""

from proxy.cli import main

main()

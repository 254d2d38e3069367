"""`python -m jaxgoodput.launcher SCRIPT ...`: join the job that the environment describes, then run a script."""

from jaxgoodput.launcher.worker import main

main()

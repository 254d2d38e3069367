"""`python -m jaxgoodput.launcher SCRIPT ...`: join the job that the environment describes, run it."""

from jaxgoodput.launcher.worker import main

main()

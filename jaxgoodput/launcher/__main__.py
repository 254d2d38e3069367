"""`python -m jaxgoodput.launcher SCRIPT ...`: join the job in the environment, then run a script."""

from jaxgoodput.launcher.worker import main

main()

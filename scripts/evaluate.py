"""The door to titan_kda.evaluate for those who look in scripts/ first; see ``--help``."""

from titan_kda.evaluate import main

raise SystemExit(main())

"""The door to titan_kda.sample for those who look in scripts/ first; see ``--help``."""

from titan_kda.sample import main

raise SystemExit(main())

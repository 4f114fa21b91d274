"""The door to titan_kda.convert for those who look in scripts/ first; see ``--help``."""

from titan_kda.convert import main

raise SystemExit(main())

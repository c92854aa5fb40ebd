from cacheflow.cli import main

raise SystemExit(main())

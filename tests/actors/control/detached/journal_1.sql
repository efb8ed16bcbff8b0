BEGIN TRANSACTION;
CREATE TABLE epoch (number INTEGER NOT NULL);
INSERT INTO "epoch" VALUES(1);
CREATE TABLE request (
            submission INTEGER NOT NULL REFERENCES submission (number) ON DELETE CASCADE,
            place INTEGER NOT NULL,
            request TEXT NOT NULL,
            outcome TEXT,
            file TEXT NOT NULL DEFAULT '',
            file_bytes INTEGER NOT NULL DEFAULT 0,
            pixels_sha256 TEXT NOT NULL DEFAULT '',
            error_kind TEXT NOT NULL DEFAULT '',
            message TEXT NOT NULL DEFAULT '',
            epoch INTEGER,
            PRIMARY KEY (submission, place)
        ) WITHOUT ROWID;
INSERT INTO "request" VALUES(1,0,'{"model": "shapes", "prompt": "a red circle", "seed": 1}','succeeded','a.png',10,'digest','','',1);
INSERT INTO "request" VALUES(1,1,'{"model": "shapes", "prompt": "a red circle", "seed": 1}',NULL,'',0,'','','',NULL);
CREATE TABLE submission (
            number INTEGER PRIMARY KEY AUTOINCREMENT,
            id TEXT NOT NULL UNIQUE,
            state TEXT NOT NULL,
            output TEXT NOT NULL,
            user TEXT NOT NULL,
            request_count INTEGER NOT NULL,
            created_at REAL NOT NULL,
            succeeded INTEGER NOT NULL DEFAULT 0,
            failed INTEGER NOT NULL DEFAULT 0,
            cancelled INTEGER NOT NULL DEFAULT 0,
            trouble TEXT NOT NULL DEFAULT ''
        );
INSERT INTO "submission" VALUES(1,'first','active','/out','ann',2,1750000000.0,1,0,0,'');
CREATE INDEX pending ON request (submission, place) WHERE outcome IS NULL;
COMMIT;
PRAGMA user_version = 1;

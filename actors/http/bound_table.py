"""`BOUNDS`: every bound on what one caller may cost the others, with its value, its setting, and the limit that counts
how often it acts.

The values are where they are used; this table names them. `scripts/write_limits.py` writes docs/reference/limits.md
from it, and tests compare it with the code: with all constants that begin with MAX_ or MOST_, all numbers of
`[serve]`, and all limits of `LimitLog`. The bounds of single fields of a request are in `field_table`.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass

from modelpool.actors.config.serve_section import ServeSection

#: headings of the page
CONNECTIONS, CALLS, REQUESTS, KEPT, WORKFLOWS, ANSWERS, JOURNAL = (
    "A connection",
    "A call",
    "A request",
    "Storage of users",
    "A ComfyUI workflow",
    "An answer, a page, a web socket",
    "Controller and journal",
)
_SERVE = "serve."


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound.

    place   the constant, as module:NAME within `modelpool.actors`, or the setting, as serve.NAME
    what    what it bounds, for users
    unit    of its value; "" for a number of things
    acts    what happens to more; "" for a refusal that names the field, the value found and the bound
    limit   the label of `modelpool_http_limits_total` and of the line in the log; "" if it is not counted: it divides
            work into parts, forgets old things, is checked by the schema of a field, or is not a server's
    """

    place: str
    what: str
    unit: str = ""
    acts: str = ""
    limit: str = ""

    @property
    def setting(self) -> str:
        """The key in `[serve]`; "" for a fixed bound."""
        return self.place.removeprefix(_SERVE) if self.place.startswith(_SERVE) else ""

    @property
    def value(self) -> float:
        """The bound, or its default."""
        if self.setting:
            settings = ServeSection()
            return settings.upload_bound_bytes if self.setting == "upload_bytes" else getattr(settings, self.setting)
        module, _, name = self.place.partition(":")
        found: float = getattr(importlib.import_module(f"modelpool.actors.{module}"), name)
        return found


_OLDEST = "the oldest is removed"
_WAITS = "more wait for their turn"
#: by heading
BOUNDS: dict[str, tuple[Bound, ...]] = {
    CONNECTIONS: (
        Bound(
            "serve.connections",
            "open in all; the number of open files is raised at start",
            "",
            "those that have waited longest are ended, up to one in 32; if all are in use, 503",
            "connections",
        ),
        Bound(
            "serve.connections_per_address",
            "open from an address other than this machine's and `trusted_proxies`",
            "",
            "the connections of it that have waited longest are ended, up to one in 32; if all are in use, 503",
            "connections_per_address",
        ),
        Bound(
            "serve.head_seconds",
            "until the head of a call has arrived, from its first byte",
            "s",
            "it is ended",
            "head_seconds",
        ),
        Bound(
            "serve.body_seconds",
            "in which a body must go on, by 1 KiB for each second",
            "s",
            "it is ended",
            "body_seconds",
        ),
        Bound("serve.idle_seconds", "without a call", "s", "it is ended", "idle_seconds"),
        Bound(
            "serve.unread_seconds",
            "without a read by the peer while data waits for it, also of a web socket",
            "s",
            "it is ended",
            "unread_seconds",
        ),
        Bound(
            "http.service.header_limit:MOST_HEADER_BYTES",
            "head of a call, and trailers of its body",
            "bytes",
            "400, and it is ended",
            "header_bytes",
        ),
        Bound("http.server:MOST_MESSAGE_BYTES", "message of a web socket's client", "bytes", "it is closed"),
        Bound("http.comfy.comfy_api:MOST_ANNOUNCED", "what a client of ComfyUI announces", "bytes", "it is not read"),
        Bound(
            "http.service.unread_bodies:MOST_SKIPPED_SECONDS",
            "in which the rest of a body is read after its answer, before its connection is closed",
            "s",
            "it is closed",
        ),
    ),
    CALLS: (
        Bound(
            "serve.requests_per_minute",
            "calls of a user in a minute; 0: any number",
            "",
            "429 with `Retry-After`",
            "requests_per_minute",
        ),
        Bound(
            "serve.queued_jobs",
            "jobs of a user that wait or run at a time, and requests in a call",
            "",
            "429 with `Retry-After`; 400 for a call with more",
            "queued_jobs",
        ),
        Bound("serve.upload_bytes", "body", "bytes", "413", "upload_bytes"),
        Bound(
            "http.comfy.comfy_api:MAX_WORKFLOW_BYTES",
            "body of a workflow, or of a list of ids",
            "bytes",
            "",
            "body_bytes",
        ),
        Bound("http.a1111.a1111_api:MAX_OPTIONS_BYTES", "body with options of A1111", "bytes", "", "body_bytes"),
        Bound(
            "http.service.bodies:MAX_BODY_VALUES",
            "values in a JSON body, counted by its commas before they are built",
            "",
            "",
            "body_values",
        ),
        Bound("request.json_text:MAX_DEPTH", "lists and objects in each other", "", "", "body_values"),
        Bound("http.service.bodies:MAX_PARTS", "texts of a form, and as many files"),
        Bound(
            "http.service.bodies:MOST_PARSED_IN_MEMORY",
            "bodies of 64 KiB to 1 MiB that are parsed at a time",
            "",
            _WAITS,
        ),
        Bound("http.service.bodies:MOST_PARSED_IN_MEMORY_OF_OWNER", "the same of a user", "", _WAITS),
        Bound("http.service.bodies:MOST_PARSED", "bodies above 1 MiB that are parsed at a time", "", _WAITS),
        Bound("http.service.bodies:MOST_PARSED_OF_OWNER", "the same of a user", "", _WAITS),
        Bound(
            "http.service.bodies:MOST_BODIES_OF_OWNER",
            "times `upload_bytes`: bodies above 1 MiB and forms of a user that arrive",
            "",
            "429 with `Retry-After`",
            "arriving_bytes",
        ),
        Bound(
            "http.service.bodies:MOST_OWNERS_OF_BODIES",
            "users who may have as many at a time",
            "",
            "429 with `Retry-After`",
            "arriving_bytes",
        ),
        Bound("serve.call_pixels", "decoded pixels of all images", "pixels", "", "request_fields"),
        Bound(
            "http.service.caller_images:MAX_CALL_PIXELS", "the same for callers without a server's settings", "pixels"
        ),
        Bound("http.service.caller_images:MAX_URL_CHARACTERS", "address of an image or a webhook", "characters"),
        Bound("http.native.native_api:MAX_CALL_LORAS", "LoRAs of all requests", "", "", "request_fields"),
        Bound("http.native.native_api:MAX_KEY_LENGTH", "idempotency key", "characters"),
        Bound("http.openai.openai_api:MAX_IMAGES", "images of a call of OpenAI's interface"),
        Bound("http.a1111.a1111_requests:MAX_IMAGES", "images of a call of A1111's interface"),
        Bound("http.a1111.a1111_extras:MAX_IMAGES", "images to enlarge in a call"),
        Bound("http.service.services:MOST_BUILDING", "calls whose requests are built at a time", "", _WAITS),
        Bound("http.service.services:MOST_BUILDING_OF_OWNER", "the same of a user", "", _WAITS),
        Bound("http.application:POOL_THREADS", "threads that wait for answers of the pool", "", _WAITS),
        Bound("http.page.thumbnails:MOST_DECODED", "outputs that are decoded for thumbnails at a time", "", _WAITS),
        Bound("http.page.thumbnails:MOST_DECODED_OF_OWNER", "the same of a user", "", _WAITS),
        Bound("http.page.page_api:MOST_SEARCHED", "ended jobs that a search looks at", "", "the search ends there"),
        Bound("http.server:MOST_HEAPS", "heaps of memory of the threads of a server (glibc)", "", "threads share them"),
        Bound("http.ray_serve.ingress:MAX_ONGOING_CALLS", "calls of a replica of Ray Serve at a time", "", _WAITS),
    ),
    REQUESTS: (
        Bound("request.pass_bounds:MAX_PASSES", "passes after the first run", "", "", "request_fields"),
        Bound(
            "serve.prompt_characters",
            "prompt, negative prompt, text of a region; twice as many in all",
            "characters",
            "",
            "request_fields",
        ),
        Bound(
            "request.bounds:MAX_PROMPT_CHARACTERS",
            "the same in job files and Python",
            "characters",
            "",
            "request_fields",
        ),
        Bound(
            "request.bounds:MAX_TEXT_CHARACTERS",
            "all texts of a request in job files and Python",
            "characters",
            "",
            "request_fields",
        ),
        Bound("request.music_fields:MAX_LYRICS", "lyrics", "characters", "", "request_fields"),
        Bound("request.bounds:MAX_LORAS", "LoRAs, also as `<lora:NAME:X>`", "", "", "request_fields"),
        Bound(
            "request.bounds:MAX_LORA_CHARACTERS",
            "text of a LoRA with its strengths",
            "characters",
            "",
            "request_fields",
        ),
        Bound("request.bounds:MAX_NAME_CHARACTERS", "names, and other short texts", "characters", "", "request_fields"),
        Bound("request.bounds:MAX_ENTRIES", "entries of other lists and settings", "", "", "request_fields"),
        Bound("request.image_fields:MAX_PARTS", "regions; ControlNets; image prompts"),
        Bound("request.image_fields:MAX_REFERENCES", "reference images"),
        Bound("request.image_prompt_fields:MAX_IMAGES", "images of an image prompt"),
        Bound("request.face_fields:MAX_FACES", "faces of an image prompt"),
        Bound("request.face_fields:MAX_FILE_BYTES", "file of faces", "bytes"),
        Bound("request.image_decoding:MAX_PIXELS", "an image", "pixels"),
        Bound("request.image_decoding:MAX_SIDE", "width and height of an image", "pixels"),
        Bound("request.control_video_fields:MAX_VIDEO_PIXELS", "all frames of a video of a ControlNet", "pixels"),
        Bound("request.audio_fields:MAX_AUDIO_SAMPLES", "all channels of an audio file", "samples"),
        Bound("request.audio_fields:MAX_AUDIO_RATE", "samples per second of an audio file"),
        Bound("request.field_table:MAX_SIZE", "width and height of an output", "pixels"),
        Bound("request.field_table:MAX_FRAMES", "frames of a video"),
        Bound("request.field_table:MAX_OUTPUTS", "outputs of a request (`n`)"),
        Bound("request.labels:MAX_ID_CHARACTERS", "`id`", "characters"),
        Bound("request.labels:MAX_METADATA_BYTES", "`metadata`", "bytes"),
        Bound("request.labels:MAX_METADATA_DEPTH", "tables in each other in `metadata`"),
        Bound("request.qos:MAX_USER_LENGTH", "name of a user", "characters"),
        Bound("request.qos:MAX_DEADLINE_SECONDS", "`deadline`", "s"),
        Bound("request.json_text:MAX_BYTES", "line of a job file, recipe", "bytes"),
        Bound("request.json_text:MAX_VALUES", "values of a line of a job file", ""),
        Bound("request.name_template:MAX_TEMPLATE_CHARACTERS", "template of names of outputs", "characters"),
        Bound("request.name_template:MAX_NAME_BYTES", "name of an output", "bytes", "it is cut"),
    ),
    KEPT: (
        Bound(
            "serve.held_pixels",
            "decoded pixels of calls, and of jobs that wait or run; four times as many of all users",
            "pixels",
            "429 with `Retry-After`",
            "held_pixels",
        ),
        Bound(
            "http.service.uploads:MOST_BYTES",
            "uploads of all users",
            "bytes",
            "413 for a larger file; otherwise the oldest of the user who has most is removed",
            "stored_bytes",
        ),
        Bound(
            "http.service.uploads:MOST_BYTES_OF_USER",
            "uploads of a user with a key",
            "bytes",
            "413 for a larger file; otherwise " + _OLDEST,
            "stored_bytes",
        ),
        Bound("http.service.uploads:MOST_FILES_OF_OWNER", "uploaded files of a user", "", _OLDEST),
        Bound(
            "serve.kept_submissions",
            "ended submissions of all users",
            "",
            "the oldest of the user who has most is forgotten; its files stay",
        ),
        Bound(
            "http.service.submissions:MOST_KEPT_JOBS",
            "jobs of ended submissions of all users",
            "",
            "the oldest submission of the user who has most is forgotten",
        ),
        Bound(
            "http.comfy.comfy_prompts:MOST_ACTIVE_CHARACTERS",
            "workflows of a user that wait or run, when another one comes",
            "characters",
            "429 with `Retry-After`",
            "workflows",
        ),
        Bound(
            "http.comfy.comfy_prompts:MOST_KEPT",
            "ended workflows of all users",
            "",
            "the oldest of the user who has most is forgotten",
        ),
        Bound(
            "http.comfy.comfy_prompts:MOST_KEPT_CHARACTERS",
            "ended workflows of all users",
            "characters",
            "the oldest of the user who has most is forgotten",
        ),
        Bound(
            "http.comfy.comfy_server_api:MOST_SETTINGS_BYTES",
            "settings of a user of ComfyUI's page",
            "bytes",
            "413; 400 for a larger body (`body_bytes`)",
            "settings_bytes",
        ),
        Bound(
            "http.native.native_api:MOST_KEYS",
            "idempotency keys of a user, without a journal",
            "",
            "the oldest is forgotten",
        ),
        Bound(
            "http.service.webhooks:MOST_PENDING",
            "webhooks that wait for their receivers",
            "",
            "429 with `Retry-After`",
            "webhooks",
        ),
        Bound(
            "http.service.webhooks:MOST_ATTEMPTS",
            "attempts to send a webhook",
            "",
            "it is given up, with a line in the log",
        ),
        Bound("http.service.node_states:MOST_NODES", "nodes of workflows with a known state", "", _OLDEST),
        Bound("http.service.submissions:MOST_NODE_ENDS", "ends of nodes that wait for a web socket", "", _OLDEST),
        Bound(
            "http.service.submissions:MOST_OUTLINES",
            "nodes of jobs of a submission that had images and failed",
            "",
            "the page does not draw further ones",
        ),
        Bound("http.page.thumbnails:MOST_BYTES", "thumbnails of all users", "bytes", _OLDEST),
        Bound(
            "http.page.live_board:MOST_REMOVED",
            "removed submissions in the updates of pages",
            "",
            "pages that have not read so far read all again",
        ),
    ),
    WORKFLOWS: (
        Bound("http.comfy.comfy_graph:MAX_NODES", "nodes", "", "", "request_fields"),
        Bound("http.comfy.comfy_graph:MAX_OUTPUT_NODES", "nodes that save or preview images", "", "", "request_fields"),
        Bound(
            "http.comfy.comfy_graph:MAX_LISTED_LEVELS", "noise levels that nodes list, in all", "", "", "request_fields"
        ),
        Bound(
            "http.comfy.comfy_api:MAX_ID_LENGTH",
            "`prompt_id`, `client_id`",
            "characters",
            "refused; `clientId` of a web socket is cut",
        ),
        Bound("http.comfy.comfy_images:MOST_PIXELS", "image that nodes change", "pixels"),
        Bound("http.comfy.comfy_node_types:MAX_SIDE", "width and height", "pixels"),
        Bound("http.comfy.comfy_node_types:MAX_BATCH", "images of a batch"),
        Bound("http.comfy.comfy_node_types:MOST_GROWN", "by which a mask grows", "pixels"),
        Bound("http.comfy.comfy_tiled_nodes:MOST_TILES", "tiles of a node that redraws an image in tiles"),
        Bound("request.workflow_fields:MAX_NODES", "nodes of a `workflow` of a request", "", "", "request_fields"),
        Bound(
            "request.workflow_fields:MAX_DEPTH", "nodes of a `workflow` behind one another", "", "", "request_fields"
        ),
        Bound("graph.features.sound_graph:MOST_VOICE", "positions of the audio of a voice, 25 of a second"),
        Bound("request.workflow_fields:MAX_TRACKS", "tracks of points through a video", "", "", "request_fields"),
        Bound("request.workflow_fields:MAX_TRACK_FRAMES", "points of such a track", "", "", "request_fields"),
        Bound("request.workflow_fields:MAX_SETTING", "numbers of settings of operations"),
        Bound(
            "request.workflow_fields:MAX_WORKFLOW_STEPS",
            "sampling steps of all nodes of a `workflow`",
            "",
            "",
            "request_fields",
        ),
        Bound(
            "graph.workflow_graph:MAX_INTERMEDIATE_BYTES",
            "results of all nodes of a `workflow`",
            "bytes",
            "",
            "request_fields",
        ),
        Bound("graph.workflow_graph:MAX_JOINED_TOKENS", "a text of a `workflow` that is made of others", "tokens"),
        Bound("http.comfy.comfy_expressions:MAX_CHARACTERS", "expression of a node", "characters"),
        Bound(
            "http.comfy.comfy_computing:MAX_COMPUTED_STEPS",
            "characters that nodes read, and steps of their searches, in all",
        ),
        Bound("http.comfy.comfy_evaluation:MAX_COMPUTED_CHARACTERS", "texts that nodes compute, in all", "characters"),
        Bound(
            "graph.features.decode_tiles_graph:MAX_PARTS",
            "tasks of a decode in tiles",
            "",
            "larger parts, no more of them",
        ),
        Bound(
            "graph.features.decode_tiles_graph:MAX_TILE_BYTES",
            "results of the tiles of a decode",
            "bytes",
            "one task decodes all",
        ),
        Bound("request.workflow_fields:MAX_NODE_INPUTS", "inputs, or settings, of a node of a `workflow`"),
        Bound("request.workflow_fields:MAX_NODE_ID", "id of a node of a `workflow`", "characters"),
    ),
    ANSWERS: (
        Bound("http.page.live_view:MOST_VIEWERS", "open pages of all users", "", "503", "pages"),
        Bound("http.page.live_view:MOST_OF_USER", "open pages of a user with a key", "", "429", "pages"),
        Bound(
            "http.comfy.comfy_prompts:MOST_WAITING",
            "messages that wait for a web socket or a stream",
            "",
            "it is closed; a preview replaces the one before it",
        ),
        Bound(
            "http.native.native_api:MOST_LISTED_ENDS", "ended jobs in an answer", "", "the next call goes on (`after`)"
        ),
        Bound("http.page.live_entries:MOST_SUBMISSIONS", "submissions that the page shows", "", "the newest are shown"),
        Bound("http.page.live_entries:MOST_TASKS", "tasks that the page shows", "", "the first are shown"),
        Bound(
            "http.page.live_entries:MOST_ENDS", "ended jobs that the page shows at first", "", "the newest are shown"
        ),
        Bound("http.page.live_entries:MOST_QUEUES", "queues that the page shows", "", "the longest are shown"),
        Bound("http.page.pool_series:MOST_SAMPLES", "samples of a chart on the page", "", _OLDEST),
        Bound("http.page.pool_series:MOST_WORKERS", "workers with charts on the page", "", "the first are shown"),
        Bound("http.page.node_graph:MOST_DRAWN", "nodes of a workflow on the page", "", "the first ones are left out"),
        Bound("http.page.live_entries:MOST_CHARACTERS", "prompt on the page", "characters", "it is cut"),
        Bound("http.service.shown_messages:MOST_CHARACTERS", "message of an error", "characters", "it is cut"),
        Bound("http.service.shown_names:MOST_BYTES", "name of an uploaded file", "bytes", "it is cut"),
        Bound("http.service.shown_names:MOST_FOLDERS", "folders in each other in the name of an uploaded file"),
        Bound(
            "control.metrics.families:MOST_LABELS", "values of a label in metrics", "", "the others are counted as one"
        ),
    ),
    JOURNAL: (
        Bound(
            "control.adaptive_batch:MAX_SIZES_KEPT",
            "requests of which the size that the load has chosen is remembered",
            "",
            "the oldest are forgotten, and have a size of the load at that time if they come again",
        ),
        Bound(
            "control.build_requests:MOST_ASKED",
            "requests in a question to the catalog",
            "",
            "the others follow in the next one",
        ),
        Bound(
            "control.question_turns:MOST_ASKED_AT_ONCE",
            "questions that the catalog has at a time, in turns of the users",
            "",
            _WAITS,
        ),
        Bound("control.question_turns:MOST_LONG_AT_ONCE", "those of them that take long", "", _WAITS),
        Bound(
            "control.catalog_process:MOST_TRIES",
            "catalog processes that may end with a question",
            "",
            "the question fails",
        ),
        Bound(
            "control.parked_jobs:MOST_STAGES",
            "combinations of stages of queued jobs that are kept once",
            "",
            "others are kept for each job",
        ),
        Bound("control.detached.records:MAX_ID_LENGTH", "id of a submission", "characters"),
        Bound(
            "control.detached.submission_journal:MOST_REQUESTS",
            "requests of all submissions in the journal",
            "",
            "the oldest submissions that have ended are removed",
        ),
        Bound(
            "control.detached.submission_journal:MOST_IN_TRANSACTION",
            "rows of the journal that are written at a time",
            "",
            _WAITS,
        ),
        Bound("control.detached.job_previews:MOST_KEPT", "previews of detached jobs", "", _OLDEST),
        Bound(
            "control.detached.submission_journal:MOST_HISTORIES", "histories of ended jobs in the journal", "", _OLDEST
        ),
        Bound("control.past_jobs:MOST_HISTORIES", "those of them that wait to be written", "", _OLDEST),
        Bound(
            "control.detached.job_service:MOST_TROUBLES",
            "troubles of submissions in `status`",
            "",
            "it names their number",
        ),
        Bound(
            "outputs.results.job_ledger:MOST_REPEATS",
            "runs of a job again since its output was lost",
            "",
            "it counts as failed",
        ),
        Bound("control.checkpoint_archive:MOST_NOTED", "saved states of runs that are remembered", "", _OLDEST),
        Bound(
            "control.task_store:MOST_PEERS",
            "nodes that a run is referred to for its files",
            "",
            "it learns of others from them",
        ),
        Bound(
            "control.task_store:MOST_LOST",
            "lost runs of a task that are kept with their reason",
            "",
            "the first are kept",
        ),
        Bound(
            "control.recorder:MOST_WAITING",
            "entries of the event log that wait for the disk",
            "",
            "the dispatcher waits for the file",
        ),
        Bound(
            "ray.session_folder:MOST_LOGS",
            "logs of ended drivers and workers, of a Ray that `modelpool up` started",
            "",
            "the oldest are removed",
        ),
        Bound(
            "ray.owned_values:MOST_WATCHED",
            "results and images in Ray of one process, which are freed once nobody uses them",
            "",
            "the oldest keep an entry of 1 KB in that process until it ends",
        ),
        Bound(
            "control.log_file:MOST_BYTES",
            "log of a pool",
            "bytes",
            "it is renamed to NAME.1, which replaces an earlier one",
        ),
        Bound(
            "control.heartbeats:MOST_BEATS", "intervals without a sign of life from a worker", "", "it counts as lost"
        ),
        Bound("control.pool_log:MOST_TOLD_FILES", "files that the log has named", "", "the oldest may be named again"),
        Bound("control.catalog_place:MOST_NAMED", "folders that a message names", "", "it names their number"),
        Bound("control.operator_desk:MOST_NAMED", "nodes and workers that a message names", "", "the first are named"),
        Bound("control.operator_orders:MOST_ORDER_SECONDS", "deadline of a drain or a restart", "seconds"),
        Bound("control.submission_list:MOST_LISTED", "submissions in `status`", "", "the newest are named"),
        Bound("control.submission_list:MOST_PROMPT", "prompt of a running job in `status`", "characters", "it is cut"),
        Bound("control.history.event_rules:MOST_CHARACTERS", "reason of an event", "characters", "it is cut"),
        Bound("control.history.event_rules:MOST_NAMED", "nodes that an event names", "", "it names their number"),
        Bound("control.history.history_file:MOST_OPEN_ROWS", "events that equal ones may be added to", "", _OLDEST),
        Bound("control.history.history_writer:MOST_SPOOLS", "records of killed controllers that wait", "", _OLDEST),
        Bound(
            "control.history.pool_history:MOST_WAITING",
            "events and costs that wait for the disk",
            "",
            "they are counted",
        ),
        Bound("control.history.run_ledger:MOST_FOLLOWED", "submissions of which costs are followed", "", _OLDEST),
    ),
}
#: constants with such names that are ranges of a value, checked by their field, and no bound of work, memory or time
RANGES = frozenset(
    {
        *("config.serve_section:MAX_PORT", "http.comfy.comfy_node_types:MAX_SEED", "http.page.live_view:MOST_ASKING"),
        *("request.qos:MAX_PRIORITY", "request.field_table:MAX_NOISE_LEVEL", "request.field_table:MAX_CLIP_SKIP"),
        *("request.field_table:MAX_BATCH", "request.field_table:MAX_VAE_TILE"),
        *("request.field_table:MAX_FRAME_RATE", "request.field_table:MAX_SECONDS", "request.field_table:MAX_LINE"),
        *("request.image_prompt_fields:MAX_STRENGTH", "request.music_fields:MAX_BPM", "request.face_fields:MAX_WIDTH"),
        *("request.upscale_fields:MAX_SCALE", "request.upscale_fields:MAX_TILE", "request.control_fields:MAX_CONTROL"),
        *("request.image_fields:MAX_REGION", "request.video_output_fields:MAX_QUALITY"),
        "graph.features.upscale_graph:MAX_OWN_PIXELS",
    }
)


def all_bounds() -> Iterator[Bound]:
    """Return every bound."""
    for bounds in BOUNDS.values():
        yield from bounds

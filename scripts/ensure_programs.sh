#!/usr/bin/env bash
# Installs Debian packages whose programs some tests use: prometheus (tests/actors/control/metrics), chromium
# (tests/actors/http/page/test_page_browser.py), ffprobe (tests/actors/http/comfy/test_saved_videos.py) and redis-server
# (tests/actors/ray/test_control_service_restart.py). Does nothing if they are there. Where it cannot install one it says
# so and ends with success: the tests that need it are skipped with a reason.
set -uo pipefail

ensure() {
    local program="$1" package="$2"
    command -v "$program" >/dev/null && return
    if ! command -v apt-get >/dev/null || [ "$(id -u)" -ne 0 ]; then
        printf 'no %s: its tests are skipped. On Debian: apt-get install %s\n' "$program" "$package" >&2
        return
    fi
    export DEBIAN_FRONTEND=noninteractive
    if ! { apt-get update -q && apt-get install -y -q --no-install-recommends "$package"; } >/dev/null 2>&1; then
        printf 'apt-get cannot install %s: the tests of %s are skipped\n' "$package" "$program" >&2
    fi
}

ensure prometheus prometheus
ensure chromium chromium
ensure ffprobe ffmpeg
RUNLEVEL=1 ensure redis-server redis-server # in that run level its installation starts no server

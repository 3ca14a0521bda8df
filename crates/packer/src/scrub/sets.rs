//! The built-in sets of scrub rules: what should not leave a sandbox by accident.

use super::rules::Action;

/// A set of rules under one name.
pub(super) struct Set {
    /// What a rules file calls it.
    pub name: &'static str,
    /// What happens to what it matches.
    pub action: Action,
    /// Patterns over paths.
    pub globs: &'static [&'static str],
    /// Names of patterns over contents; a file must match one of these where there are any.
    pub content: &'static [&'static str],
}

/// All sets. A rules file names those that it wants, or `all`.
pub(super) const SETS: [Set; 9] = [
    Set {
        name: "package-caches",
        action: Action::Scrub,
        globs: &[
            "/var/cache/apt/**",
            "/var/lib/apt/lists/**",
            "/var/cache/dnf/**",
            "/var/cache/yum/**",
            "/var/cache/apk/**",
            "/var/cache/pacman/pkg/**",
            "/var/cache/zypp/**",
            "**/.npm/_cacache/",
            "**/.npm/_logs/",
            "**/.cache/yarn/",
            "**/.cache/pnpm/",
            "**/.cache/go-build/",
            "**/.cargo/registry/cache/",
            "**/.gradle/caches/",
            "**/.cache/composer/",
        ],
        content: &[],
    },
    Set {
        name: "pip-caches",
        action: Action::Scrub,
        globs: &[
            "**/.cache/pip/",
            "**/.cache/uv/",
            "**/.cache/pypoetry/",
            "**/.cache/pipenv/",
            "**/.conda/pkgs/",
        ],
        content: &[],
    },
    Set {
        name: "shell-history",
        action: Action::Scrub,
        globs: &[
            ".bash_history",
            ".zsh_history",
            ".sh_history",
            ".ash_history",
            ".history",
            "fish_history",
            ".python_history",
            ".node_repl_history",
            ".irb_history",
            ".psql_history",
            ".mysql_history",
            ".sqlite_history",
            ".rediscli_history",
            ".lesshst",
            ".viminfo",
            ".wget-hsts",
        ],
        content: &[],
    },
    Set {
        name: "temp-files",
        action: Action::Scrub,
        globs: &["/tmp/*", "/var/tmp/*", "/run/*", "*.swp", "*~", ".nfs*"],
        content: &[],
    },
    Set {
        name: "agent-logs",
        action: Action::Scrub,
        globs: &[
            "**/.claude/projects/",
            "**/.claude/logs/",
            "**/.claude/history.jsonl",
            "**/.codex/sessions/",
            "**/.codex/log/",
            "**/.codex/history.jsonl",
            "**/.aider.chat.history.md",
            "**/.aider.input.history",
            "**/.openhands/",
            "**/.swe-agent/",
            "/var/log/**",
        ],
        content: &[],
    },
    Set {
        name: "ssh",
        action: Action::Scrub,
        globs: &["**/.ssh/", "/etc/ssh/ssh_host_*_key", "known_hosts.old"],
        content: &[],
    },
    Set {
        name: "cloud-credentials",
        action: Action::Scrub,
        globs: &[
            "**/.aws/",
            "**/.azure/",
            "**/.config/gcloud/",
            "**/.config/gh/",
            "**/.kube/",
            "**/.docker/config.json",
            "**/.config/containers/auth.json",
            ".netrc",
            ".git-credentials",
            ".pgpass",
            ".npmrc",
            ".pypirc",
            "**/.cargo/credentials",
            "**/.cargo/credentials.toml",
            "**/.terraform.d/credentials.tfrc.json",
            "**/.config/rclone/rclone.conf",
            "**/.s3cfg",
            "**/.boto",
        ],
        content: &[],
    },
    Set {
        name: "keys",
        action: Action::Scrub,
        globs: &[
            "id_rsa",
            "id_dsa",
            "id_ecdsa",
            "id_ed25519",
            "*.p12",
            "*.pfx",
            "*.kdbx",
            "*.ppk",
            "*.jks",
            "**/.gnupg/",
        ],
        content: &[],
    },
    Set {
        name: "secrets",
        action: Action::Suspicious,
        globs: &[],
        content: &["all"],
    },
];

//! What `build` and `pack-diff` print about the layer they published.

use std::io;

use layerpack_packer::{EntryCounts, GitIndex};
use layerpack_store::{PublishOutcome, Reference};
use serde::Serialize;

use crate::context::Context;
use crate::output::{note, print};
use crate::units::human_bytes;

/// A published layer in `-o json`.
#[derive(Debug, Serialize)]
pub(crate) struct Published {
    reference: String,
    /// Digest of the manifest; absent after a dry run.
    #[serde(skip_serializing_if = "Option::is_none")]
    digest: Option<String>,
    /// Identity of the contents, whatever their name.
    #[serde(skip_serializing_if = "Option::is_none")]
    layer_id: Option<String>,
    /// False when the store had exactly this layer already.
    created: bool,
    counts: EntryCounts,
    /// Bytes of the metadata image, uncompressed.
    meta_bytes: u64,
    store: Written,
    cpu_seconds: f64,
    /// Git indexes that were looked at, with `--git-index`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    git: Vec<GitIndex>,
    warnings: Vec<String>,
}

/// What went into the store.
#[derive(Debug, Serialize)]
struct Written {
    /// Bytes of file contents that were read and chunked.
    raw_bytes: u64,
    /// Those of them that the store did not have.
    new_raw_bytes: u64,
    /// Bytes that were written, compressed.
    new_bytes: u64,
    new_chunks: u64,
    reused_chunks: u64,
}

impl Published {
    /// Gathers the parts of a report.
    pub(crate) fn new(
        published: &layerpack_store::Published,
        counts: EntryCounts,
        meta_bytes: u64,
        warnings: Vec<String>,
        cpu_seconds: f64,
    ) -> Self {
        let reference = &published.reference;
        Self::maybe(
            reference,
            Some(published),
            counts,
            meta_bytes,
            warnings,
            cpu_seconds,
        )
    }

    /// The same of what may have been a dry run: then there are no digests, and nothing was
    /// written.
    pub(crate) fn maybe(
        reference: &Reference,
        published: Option<&layerpack_store::Published>,
        counts: EntryCounts,
        meta_bytes: u64,
        warnings: Vec<String>,
        cpu_seconds: f64,
    ) -> Self {
        let stats = published.map(|published| published.stats);
        let stats = stats.unwrap_or_default();
        Self {
            reference: reference.to_string(),
            digest: published.map(|published| published.digest.to_string()),
            layer_id: published.map(|published| published.layer_id.to_string()),
            created: published.is_some_and(|p| p.outcome == PublishOutcome::Created),
            counts,
            meta_bytes,
            store: Written {
                raw_bytes: stats.raw_bytes,
                new_raw_bytes: stats.new_raw_bytes,
                new_bytes: stats.new_bytes,
                new_chunks: stats.new_chunks,
                reused_chunks: stats.reused_chunks,
            },
            cpu_seconds,
            git: Vec::new(),
            warnings,
        }
    }

    /// With the git indexes that were looked at.
    pub(crate) fn with_git(mut self, git: Vec<GitIndex>) -> Self {
        self.git = git;
        self
    }

    /// Says the figures on stderr.
    pub(crate) fn note(&self) {
        let counts = &self.counts;
        note(&format!(
            "{} files, {} directories, {}; {} new in the store{}",
            counts.files,
            counts.directories,
            human_bytes(counts.bytes),
            human_bytes(self.store.new_bytes),
            match (self.created, &self.digest) {
                (true, _) => "",
                (false, Some(_)) => ", already published",
                (false, None) => ": a dry run, nothing was published",
            },
        ));
        for index in &self.git {
            note(&git_line(index));
        }
    }

    /// Prints reference and digest to stdout, the figures to stderr.
    pub(crate) fn print(&self, context: &Context) -> io::Result<()> {
        if !context.quiet && context.format == crate::output::Format::Text {
            self.note();
        }
        print(context.format, self, |out| writeln!(out, "{}", self.line()))
    }

    /// Reference and digest.
    pub(crate) fn line(&self) -> String {
        match &self.digest {
            Some(digest) => format!("{} {digest}", self.reference),
            None => self.reference.clone(),
        }
    }
}

fn git_line(index: &GitIndex) -> String {
    let path = &index.path;
    if let Some(why) = &index.left_alone {
        return format!("git index /{path} is left as it is: {why}");
    }
    let mut line = format!(
        "git index /{path}: {} of {} entries refreshed",
        index.refreshed, index.entries
    );
    if index.differing > 0 {
        line.push_str(&format!(
            ", {} have other contents than committed or staged",
            index.differing
        ));
    }
    if index.missing > 0 {
        line.push_str(&format!(", {} are not in the layer", index.missing));
    }
    line
}

/// The platform asked for, or this machine's, in the words of OCI.
pub(crate) fn platform(asked: Option<String>) -> String {
    asked.unwrap_or_else(|| {
        let arch = match std::env::consts::ARCH {
            "x86_64" => "amd64",
            "aarch64" => "arm64",
            "x86" => "386",
            other => other,
        };
        format!("{}/{arch}", std::env::consts::OS)
    })
}

//! Options of `layerpack build`.

use std::ffi::OsString;
use std::num::ParseIntError;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Args;
use layerpack_packer::{IdMapRange, Limits, Owners};

use super::SignWithArgs;
use crate::units::Bytes;

#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    #[command(flatten)]
    pub(crate) sign: SignWithArgs,
    /// base, workspace or toolkit; diff with --diff-from, and then the default
    #[arg(long, required_unless_present_any = ["split", "diff_from"])]
    pub(crate) kind: Option<String>,
    /// Name of the layer; with --split, of the parts that have none of their own
    #[arg(long, required_unless_present = "split")]
    pub(crate) name: Option<String>,
    /// Version of the layer; once published it never changes; with --split as --name
    #[arg(long, required_unless_present = "split")]
    pub(crate) version: Option<String>,
    /// What to pack: `dir:PATH`, `tar:PATH` (plain, gzip, zstd, xz or bzip2; `-` for standard
    /// input), `oci:DIR[:TAG]`, `docker-archive:FILE[:NAME]` or
    /// `registry:HOST/REPOSITORY[:TAG|@DIGEST]`
    #[arg(long, value_name = "SRC")]
    pub(crate) from: String,
    /// The layers that this one lies on, bottom first; a diff in front brings its parents along.
    /// Paths lead through their links, hard links may name their files (repeatable)
    #[arg(long, value_name = "REF", num_args = 1..)]
    pub(crate) parent: Vec<String>,
    /// Pack only what is different from what these layers show, bottom first
    #[arg(
        long,
        value_name = "REF",
        num_args = 1..,
        conflicts_with_all = ["parent", "at", "per_layer", "split", "git_index"]
    )]
    pub(crate) diff_from: Vec<String>,
    /// Put the source's contents under this path of the layer
    #[arg(long, value_name = "PATH")]
    pub(crate) at: Option<OsString>,
    #[command(flatten)]
    pub(crate) select: SelectArgs,
    /// Keep this extended attribute too, or with `*` at its end all that begin so (repeatable)
    #[arg(long, value_name = "NAME")]
    pub(crate) xattr: Vec<String>,
    /// Label for people and tools (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) label: Vec<String>,
    /// Annotation of the manifest, for programs (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) annotation: Vec<String>,
    /// Platform the contents are made for, such as linux/amd64 [default: this machine's]
    #[arg(long, value_name = "OS/ARCH[/VARIANT]", value_parser = platform)]
    pub(crate) platform: Option<String>,
    /// Speak to the registry of registry:... without TLS (on this machine that needs no option)
    #[arg(long)]
    pub(crate) plain_http: bool,
    /// Make one layer of each of an image's: base/NAME:VERSION, then diff/NAME:VERSION-layer-N,
    /// the topmost diff/NAME:VERSION
    #[arg(long)]
    pub(crate) per_layer: bool,
    /// Make several layers of the source, by the path rules of this TOML file
    #[arg(long, value_name = "FILE", conflicts_with_all = ["per_layer", "parent", "kind"])]
    pub(crate) split: Option<PathBuf>,
    /// With --split: what no rule names is an error
    #[arg(long)]
    pub(crate) strict: bool,
    /// Refresh the index of git repositories, so that the first `git status` on the mounted
    /// layer reads no files
    #[arg(long)]
    pub(crate) git_index: bool,
    /// Clamp times that are later than this many seconds since 1970; empty: do not
    #[arg(
        long,
        env = "SOURCE_DATE_EPOCH",
        value_name = "SECONDS",
        allow_negative_numbers = true
    )]
    pub(crate) source_date_epoch: Option<Epoch>,
    /// Make an empty layer of an archive without entries, which is else an error
    #[arg(long)]
    pub(crate) allow_empty: bool,
    /// Read every file and every frame that is shared anew, whatever earlier builds remember
    #[arg(long)]
    pub(crate) no_cache: bool,
    /// Compression level of new data; does not change the layer's identity
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(1..=19))]
    pub(crate) level: i32,
    /// Compression threads [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) jobs: Option<u16>,
    #[command(flatten)]
    pub(crate) limits: LimitArgs,
}

/// Seconds since 1970, or nothing: an empty variable is as good as none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Epoch(pub(crate) Option<i64>);

impl FromStr for Epoch {
    type Err = ParseIntError;

    fn from_str(text: &str) -> Result<Self, ParseIntError> {
        match text.trim() {
            "" => Ok(Self(None)),
            text => text.parse().map(|seconds| Self(Some(seconds))),
        }
    }
}

/// What of a source is packed, and whose it becomes.
#[derive(Debug, Args)]
pub(crate) struct SelectArgs {
    /// Leave out matching paths; `*` stops at `/`, `**` does not (repeatable)
    #[arg(long, value_name = "PATTERN")]
    pub(crate) exclude: Vec<String>,
    /// Pack only matching paths, what is below them, and the directories that lead there;
    /// --exclude wins, the order of the options does not matter (repeatable)
    #[arg(long, value_name = "PATTERN")]
    pub(crate) include: Vec<String>,
    /// User ids OUTSIDE, OUTSIDE+1, ... of the source become INSIDE, INSIDE+1, ... in the layer,
    /// COUNT of them; other ids are an error (repeatable)
    #[arg(long, value_name = "INSIDE:OUTSIDE:COUNT")]
    pub(crate) uid_map: Vec<IdMapRange>,
    /// The same for group ids (repeatable)
    #[arg(long, value_name = "INSIDE:OUTSIDE:COUNT")]
    pub(crate) gid_map: Vec<IdMapRange>,
    /// Everything belongs to user 0 and group 0
    #[arg(long, conflicts_with_all = ["uid_map", "gid_map"])]
    pub(crate) all_root: bool,
}

impl SelectArgs {
    /// Whose things become whose.
    pub(crate) fn owners(&self) -> Owners {
        Owners {
            uid_map: self.uid_map.clone(),
            gid_map: self.gid_map.clone(),
            all_root: self.all_root,
        }
    }
}

/// Bounds on what a source may hold, against bombs.
#[derive(Debug, Args)]
#[command(next_help_heading = "Limits on the source")]
pub(crate) struct LimitArgs {
    /// Most entries [default: 20000000]
    #[arg(long, value_name = "N")]
    pub(crate) max_entries: Option<u64>,
    /// Most bytes of contents, holes of sparse files included, and of the uncompressed archive or
    /// image, such as 20g [default: 4t, without holes]
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_bytes: Option<Bytes>,
    /// Most uncompressed bytes for each stored one of a compressed archive, counted from 1 GiB on
    /// [default: 50000]
    #[arg(long, value_name = "N")]
    pub(crate) max_ratio: Option<u64>,
    /// Longest path [default: 256k]
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_path: Option<Bytes>,
    /// Most directories one in the other [default: 32768]
    #[arg(long, value_name = "N")]
    pub(crate) max_depth: Option<u64>,
    /// Largest value of an extended attribute [default: 65535]
    #[arg(long, value_name = "BYTES")]
    pub(crate) max_xattr: Option<Bytes>,
}

impl LimitArgs {
    /// The defaults with what was given.
    pub(crate) fn limits(&self) -> Limits {
        let defaults = Limits::default();
        let bytes = |given: Option<Bytes>, default| given.map_or(default, |bytes| bytes.0);
        Limits {
            max_entries: self.max_entries.unwrap_or(defaults.max_entries),
            max_bytes: bytes(self.max_bytes, defaults.max_bytes),
            max_apparent: bytes(self.max_bytes, defaults.max_apparent),
            max_ratio: self.max_ratio.unwrap_or(defaults.max_ratio),
            max_path: bytes(self.max_path, defaults.max_path),
            max_depth: self.max_depth.unwrap_or(defaults.max_depth),
            max_xattr_value: bytes(self.max_xattr, defaults.max_xattr_value),
            ..defaults
        }
    }
}

/// Checks that a platform has the form that images use: two or three words.
fn platform(text: &str) -> Result<String, String> {
    let words: Vec<&str> = text.split('/').collect();
    let is_word = |word: &&str| {
        !word.is_empty()
            && (word.bytes()).all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
    };
    if (2..=3).contains(&words.len()) && words.iter().all(is_word) {
        Ok(text.to_owned())
    } else {
        Err("expected OS/ARCH or OS/ARCH/VARIANT, such as linux/amd64".to_owned())
    }
}

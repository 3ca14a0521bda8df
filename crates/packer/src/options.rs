//! What callers say, and what they get back.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use layerpack_store::{Digest, Manifest, ParentRef, Published, Reference};
use serde::Serialize;

use crate::error::PackError;
use crate::git::GitIndex;
use crate::owner::Owners;
use crate::scrub::{LowerLayer, Rules, ScrubReport};

/// Where a tree comes from. SEMANTICS.md says what each source means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// A directory of this machine.
    Dir(PathBuf),
    /// A tar archive: plain or compressed with gzip, zstd, xz or bzip2, told apart by its first
    /// bytes. The path `-` is standard input; a file of that name is `./-`.
    Tar(PathBuf),
}

impl FromStr for Source {
    type Err = PackError;

    fn from_str(text: &str) -> Result<Self, PackError> {
        let invalid = |why| PackError::InvalidSource {
            text: text.chars().take(300).collect(),
            why,
        };
        let (scheme, path) = text
            .split_once(':')
            .ok_or_else(|| invalid("it has no scheme"))?;
        if path.is_empty() {
            return Err(invalid("its path is empty"));
        }
        match scheme {
            "dir" => Ok(Self::Dir(PathBuf::from(path))),
            "tar" => Ok(Self::Tar(PathBuf::from(path))),
            _ => Err(invalid("its scheme is not known")),
        }
    }
}

/// Bounds on what a source may hold. Passing one is an error that names it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Most entries: files, directories, links, and an archive's headers.
    pub max_entries: u64,
    /// Most bytes read: file contents, or the uncompressed archive. Holes are not read.
    pub max_bytes: u64,
    /// Most bytes of all files together, holes included: what who reads them without knowing of
    /// holes gets. Of an image, of each layer.
    pub max_apparent: u64,
    /// Most uncompressed bytes for each stored one of a compressed archive. Counts from 1 GiB of
    /// uncompressed bytes on.
    pub max_ratio: u64,
    /// Longest path in bytes.
    pub max_path: u64,
    /// Most components in a path.
    pub max_depth: u64,
    /// Largest value of one extended attribute in bytes. Images hold up to 65,535, one less than
    /// the kernel allows.
    pub max_xattr_value: u64,
    /// Most bytes of one archive header's extensions (PAX records, long names, sparse maps).
    pub max_header: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_entries: 20_000_000,
            max_bytes: 1 << 42,
            max_apparent: u64::MAX,
            // zstd makes 32,768 of one where all is zeros; no other files come near.
            max_ratio: 50_000,
            max_path: 256 << 10,
            max_depth: 32_768,
            max_xattr_value: 65_535,
            max_header: 16 << 20,
        }
    }
}

/// What to build, from what.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct BuildOptions {
    /// What the layer is published as. Its kind decides whether whiteouts mean something and
    /// whether the source's root is the layer's own.
    pub reference: Reference,
    /// Where the tree comes from.
    pub source: Source,
    /// Path in the layer below which the source is put, `/`-separated; None: at the root.
    pub at: Option<Vec<u8>>,
    /// Layers that this one is meant to lie on, bottom first; recorded in the manifest. What they
    /// show decides where paths lead, what hard links name and how directories look that the
    /// source only passes through. A base has none.
    pub parents: Vec<ParentRef>,
    /// Pack only what is different from what `parents` show, so that the layer on top of them is
    /// the source's tree.
    pub difference: bool,
    /// Platform, as in `linux/amd64`.
    pub platform: String,
    /// Labels of the manifest.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the manifest.
    pub annotations: BTreeMap<String, String>,
    /// zstd level. Not part of the layer's identity.
    pub level: i32,
    /// Threads that compress; 0 is one per processor. Not part of the layer's identity.
    pub jobs: usize,
    /// Later modification times become this one, in seconds since 1970.
    pub source_date_epoch: Option<i64>,
    /// Extended attributes to keep: full names, or prefixes that end with `*`. Others are
    /// dropped with one warning for each name; overlayfs' own are always dropped, each with a warning.
    pub xattrs: Vec<String>,
    /// Paths of the source to leave out, see SEMANTICS.md for the patterns.
    pub excludes: Vec<String>,
    /// Paths of the source that alone are wanted; empty: all. Excludes win.
    pub includes: Vec<String>,
    /// Whose things are in the layer.
    pub owners: Owners,
    /// Whether git's indexes are given what the mounted layer shows, so that the first
    /// `git status` reads no files. Costs hashing of all contents.
    pub git_index: bool,
    /// Whether an archive without any entry is an empty layer; else it is an error, since most such
    /// archives are something that went wrong.
    pub allow_empty: bool,
    /// Bounds on the source.
    pub limits: Limits,
    /// Directory in which this machine remembers what files of directory sources held and which
    /// frames of stores it has verified; made if it is missing. `None`: nothing is remembered,
    /// and every file and every frame that is shared is read. See SEMANTICS.md, "Build cache".
    pub cache: Option<PathBuf>,
    /// Directory for temporary files without names, with what has to be known of a large source until it
    /// is packed; made if it is missing. `None`: [`BuildOptions::cache`]; without that either, all stays
    /// in memory.
    pub scratch: Option<PathBuf>,
    /// Use nothing of what [`BuildOptions::cache`] remembers: read all, and remember that instead.
    pub fresh: bool,
    /// After how many entries those of an archive are set aside in a temporary file, in
    /// [`BuildOptions::scratch_directory`], until its contents are stored: what takes the least memory is
    /// a matter of size alone, the layer is the same. Without such a directory none are; where patterns
    /// choose among the entries, see SEMANTICS.md, "Limits".
    pub aside_after: u64,
}

/// See [`BuildOptions::aside_after`]: from about so many on the tree takes more memory than the rest.
pub(crate) const ASIDE_AFTER: u64 = 100_000;

/// Extended attributes that layers keep unless told otherwise. `security.selinux`, `trusted.*`
/// and the like are the build machine's own and stay there.
pub const DEFAULT_XATTRS: [&str; 4] = [
    "user.*",
    "security.capability",
    "system.posix_acl_access",
    "system.posix_acl_default",
];

impl BuildOptions {
    /// Options with everything at its default.
    #[must_use]
    pub fn new(reference: Reference, source: Source) -> Self {
        Self {
            reference,
            source,
            at: None,
            parents: Vec::new(),
            difference: false,
            platform: "linux/amd64".to_owned(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            level: 3,
            jobs: 0,
            source_date_epoch: None,
            xattrs: DEFAULT_XATTRS
                .iter()
                .map(|name| (*name).to_owned())
                .collect(),
            excludes: Vec::new(),
            includes: Vec::new(),
            owners: Owners::default(),
            git_index: false,
            allow_empty: false,
            limits: Limits::default(),
            cache: None,
            scratch: None,
            fresh: false,
            aside_after: ASIDE_AFTER,
        }
    }

    /// Where temporary files are to be.
    #[must_use]
    pub fn scratch_directory(&self) -> Option<&Path> {
        self.scratch.as_deref().or(self.cache.as_deref())
    }
}

/// One run of ids of an id map, as in `/proc/PID/uid_map`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IdMapRange {
    /// First id as the sandbox sees it.
    pub inside: u32,
    /// First id as it lies on disk.
    pub outside: u32,
    /// How many ids.
    pub count: u32,
}

/// Which extended attributes the sandbox's overlay mount used for its own marks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OverlayXattrs {
    /// `trusted.overlay.*`: an ordinary mount.
    #[default]
    Trusted,
    /// `user.overlay.*`: a mount with the option `userxattr`.
    User,
}

/// Which upper to pack, and how.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct PackDiffOptions {
    /// What the snapshot is published as, of kind `diff`.
    pub reference: Reference,
    /// The overlay's upper directory. Nothing else is read.
    pub upper: PathBuf,
    /// How user ids on disk become those of the layer; empty: as they are.
    pub uid_map: Vec<IdMapRange>,
    /// The same for group ids.
    pub gid_map: Vec<IdMapRange>,
    /// Which marks are the overlay's.
    pub overlay_xattrs: OverlayXattrs,
    /// The layers that the sandbox's overlay lies on, bottom first; recorded in the manifest.
    pub stack: Vec<ParentRef>,
    /// Platform, as in `linux/amd64`.
    pub platform: String,
    /// Labels of the manifest.
    pub labels: BTreeMap<String, String>,
    /// Annotations of the manifest.
    pub annotations: BTreeMap<String, String>,
    /// zstd level. Not part of the layer's identity.
    pub level: i32,
    /// Threads that compress; 0 is one per processor.
    pub jobs: usize,
    /// Extended attributes to keep, as in [`BuildOptions::xattrs`].
    pub xattrs: Vec<String>,
    /// Paths to leave out, as in [`BuildOptions::excludes`].
    pub excludes: Vec<String>,
    /// What must not leave.
    pub rules: Option<Rules>,
    /// The layers below as directories, topmost first: rules look there for what a snapshot
    /// cannot take away.
    pub lowers: Vec<LowerLayer>,
    /// A directory of the upper's filesystem for unnamed files, through which large files are
    /// copied by reference where that can be done.
    pub scratch: Option<PathBuf>,
    /// Whether git's indexes in the upper are given what the mounted layer shows, as in
    /// [`BuildOptions::git_index`]; and those in layers that are taken in (`squash`). Entries of files that
    /// the snapshot does not have stay as they are, but see `moves`.
    pub git_index: bool,
    /// Which layers below a restored snapshot are others than those below the sandbox: entries of files
    /// of theirs are refreshed too. Asked if there is an index to refresh.
    pub moves: Option<Moves>,
    /// The topmost layers of `stack` that are taken into the snapshot, bottom first: diffs, whose
    /// chunks it names and copies only where they share a frame with what it does not have. It then
    /// lies on the others. [`PackDiffOptions::rules`] hold for what comes from them too.
    pub squash: Vec<ParentRef>,
    /// Do everything but publish.
    pub dry_run: bool,
    /// As [`BuildOptions::cache`], of which only what is remembered of verified frames counts: the
    /// frames of a large file of which little changed are not all read again.
    pub cache: Option<PathBuf>,
    /// Bounds on the upper.
    pub limits: Limits,
}

/// Layers that are mounted below a sandbox, and the layers that are mounted in their place below what is
/// made of its snapshot, each bottom first. Both show the same files.
#[derive(Clone)]
pub struct Moves(pub Arc<dyn Fn() -> Option<Moved> + Send + Sync>);

/// What [`Moves`] says: before and after.
pub type Moved = (Vec<(Digest, Manifest)>, Vec<(Digest, Manifest)>);

impl std::fmt::Debug for Moves {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Moves")
    }
}

impl PackDiffOptions {
    /// Options with everything at its default.
    #[must_use]
    pub fn new(reference: Reference, upper: PathBuf) -> Self {
        Self {
            reference,
            upper,
            uid_map: Vec::new(),
            gid_map: Vec::new(),
            overlay_xattrs: OverlayXattrs::default(),
            stack: Vec::new(),
            platform: "linux/amd64".to_owned(),
            labels: BTreeMap::new(),
            annotations: BTreeMap::new(),
            level: 3,
            jobs: 0,
            xattrs: DEFAULT_XATTRS
                .iter()
                .map(|name| (*name).to_owned())
                .collect(),
            excludes: Vec::new(),
            rules: None,
            lowers: Vec::new(),
            scratch: None,
            git_index: false,
            moves: None,
            squash: Vec::new(),
            dry_run: false,
            cache: None,
            limits: Limits::default(),
        }
    }
}

/// Told of what happens while packing, from several threads. All methods do nothing by default.
pub trait Progress: Sync {
    /// A new phase: `scan`, `read`, `publish`.
    fn phase(&self, _name: &str) {}
    /// An entry of the source was seen; its path in the layer.
    fn entry(&self, _path: &[u8]) {}
    /// So many more bytes of file contents were read.
    fn bytes(&self, _n: u64) {}
    /// A warning of work that then failed. Those of work that succeeded are in its report.
    fn warning(&self, _text: &str) {}
}

/// A [`Progress`] that ignores everything.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}

/// What a layer holds, counted by name: hard links count as what they link to, as often as there
/// are names.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
pub struct EntryCounts {
    /// Regular files.
    pub files: u64,
    /// Directories, the root included.
    pub directories: u64,
    /// Symbolic links.
    pub symlinks: u64,
    /// Devices, fifos, sockets and whiteouts, as in the manifest.
    pub others: u64,
    /// Whiteouts, which are among the others.
    pub whiteouts: u64,
    /// Opaque directories.
    pub opaque: u64,
    /// Implicit directories.
    pub implicit: u64,
    /// Apparent bytes of regular files, each inode once.
    pub bytes: u64,
}

/// What [`crate::build`] did.
#[derive(Debug)]
pub struct BuildReport {
    /// Reference, digests and store figures.
    pub published: Published,
    /// What the layer holds.
    pub counts: EntryCounts,
    /// Size of the layer's metadata image in bytes.
    pub meta_bytes: u64,
    /// What was dropped or altered, in words. Bounded: the last line says how many more.
    pub warnings: Vec<String>,
    /// Processor time of this process during the build, in seconds, user and system.
    pub cpu_seconds: f64,
    /// The git indexes that were looked at, where that was asked for.
    pub git: Vec<GitIndex>,
}

/// What [`crate::pack_diff`] and [`crate::snapshot`] did.
#[derive(Debug)]
pub struct PackDiffReport {
    /// Reference, digests and store figures; `None` after a dry run.
    pub published: Option<Published>,
    /// What the layer holds.
    pub counts: EntryCounts,
    /// Size of the layer's metadata image in bytes.
    pub meta_bytes: u64,
    /// What was dropped or altered, in words. Bounded: the last line says how many more.
    pub warnings: Vec<String>,
    /// Processor time of this process meanwhile, in seconds, user and system.
    pub cpu_seconds: f64,
    /// What rules did.
    pub scrub: ScrubReport,
    /// For how long the sandbox was halted, each time, halting included.
    pub frozen: Vec<Duration>,
    /// Large files that were copied by reference before they were read.
    pub copied_files: u64,
    /// The git indexes that were looked at, where that was asked for.
    pub git: Vec<GitIndex>,
}

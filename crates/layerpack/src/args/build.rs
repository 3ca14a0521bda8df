//! Options of `layerpack build`.

use std::ffi::OsString;

use clap::Args;

#[derive(Debug, Args)]
pub(crate) struct BuildArgs {
    /// base, workspace or toolkit
    #[arg(long)]
    pub(crate) kind: String,
    /// Name of the layer
    #[arg(long)]
    pub(crate) name: String,
    /// Version of the layer; once published it never changes
    #[arg(long)]
    pub(crate) version: String,
    /// What to pack: `dir:PATH`, `tar:PATH` (plain, gzip or zstd), `oci:DIR[:TAG]` or
    /// `docker-archive:FILE[:NAME]`
    #[arg(long, value_name = "SRC")]
    pub(crate) from: String,
    /// A layer this one is meant to lie on, bottom first (repeatable)
    #[arg(long, value_name = "REF")]
    pub(crate) parent: Vec<String>,
    /// Put the source's contents under this path of the layer
    #[arg(long, value_name = "PATH")]
    pub(crate) at: Option<OsString>,
    /// Leave out matching paths; `*` stops at `/`, `**` does not (repeatable)
    #[arg(long, value_name = "PATTERN")]
    pub(crate) exclude: Vec<String>,
    /// Keep this extended attribute too, or with `*` at its end all that begin so (repeatable)
    #[arg(long, value_name = "NAME")]
    pub(crate) xattr: Vec<String>,
    /// Label for people and tools (repeatable)
    #[arg(long, value_name = "KEY=VALUE")]
    pub(crate) label: Vec<String>,
    /// Platform the contents are made for, such as linux/amd64 [default: this machine's]
    #[arg(long, value_name = "OS/ARCH")]
    pub(crate) platform: Option<String>,
    /// Make one layer of each of an image's: base/NAME:VERSION, then diff/NAME:VERSION-layer-N,
    /// the topmost diff/NAME:VERSION
    #[arg(long)]
    pub(crate) per_layer: bool,
    /// Clamp times that are later than this many seconds since 1970
    #[arg(
        long,
        env = "SOURCE_DATE_EPOCH",
        value_name = "SECONDS",
        allow_negative_numbers = true
    )]
    pub(crate) source_date_epoch: Option<i64>,
    /// Compression level of new data; does not change the layer's identity
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(i32).range(1..=19))]
    pub(crate) level: i32,
    /// Compression threads [default: one per processor]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1024))]
    pub(crate) jobs: Option<u16>,
}

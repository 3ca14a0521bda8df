//! Opens an archive: plain, or compressed with gzip, zstd, xz or bzip2, told apart by the first
//! bytes.
//!
//! Of each format all parts that stand one after the other are read: gzip members, zstd frames
//! with skippable ones between them, xz streams with their padding, bzip2 streams. Input that ends
//! early, and input that goes on with something else, are errors; zero bytes after a gzip member
//! are padding, as `gzip` takes them. What decoders need in memory is bounded, and so is the ratio
//! of what comes out to what went in.

mod bounds;
mod gzip;
mod lazy;
mod stdin;

use std::io::{BufReader, Cursor, Read};
use std::path::Path;

use bzip2::bufread::MultiBzDecoder;
use liblzma::bufread::XzDecoder;
use liblzma::stream::{CONCATENATED, Stream};

use self::bounds::{Bounded, Watch, Watched};
use self::gzip::Gzip;
pub(crate) use self::lazy::{is_landmark, is_lazy_file};
use crate::error::{PackError, Result};

const GZIP: &[u8] = &[0x1f, 0x8b];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
const BZIP2: &[u8] = b"BZh";
/// First bytes that tell formats apart.
const MAGIC: u64 = 6;
/// Compressed input is read in pieces of this size.
const BUFFER: usize = 256 << 10;
/// Most memory of an xz decoder in bytes: `xz -9` needs 65 MiB, and windows of 128 MiB are what is
/// taken of zstd too.
const XZ_MEMORY: u64 = 130 << 20;
/// What is called by this path is standard input.
pub(crate) const STDIN: &str = "-";

/// An archive's uncompressed bytes.
pub(crate) struct Input {
    /// The bytes.
    pub reader: Box<dyn Read + Send>,
    /// Whether it is known to be an archive for lazy readers before it is read.
    pub lazy: bool,
    watch: Watch,
}

/// What can be said of an archive when all of it was read.
pub(crate) struct Ending(Watch);

impl Ending {
    /// Whether it ends like an archive for lazy readers: eStargz or zstd:chunked.
    pub(crate) fn is_lazy(&self) -> bool {
        lazy::has_footer(&self.0.tail())
    }
}

impl Input {
    /// Separates the bytes from what can be said after them.
    pub(crate) fn split(self) -> (Box<dyn Read + Send>, Ending) {
        (self.reader, Ending(self.watch))
    }
}

/// Opens the archive at `path`, `-` being standard input. More than `max_ratio` uncompressed bytes
/// for each stored one are an error, if they are many.
pub(crate) fn open(path: &Path, max_ratio: u64) -> Result<Input> {
    if path == Path::new(STDIN) {
        let name = Path::new("standard input");
        return match stdin::file() {
            Some(file) => decode(file, name, max_ratio),
            None => decode(std::io::stdin(), name, max_ratio),
        };
    }
    let io = |action, source| PackError::io(action, path.display().to_string(), source);
    let file = fs_err::File::open(path).map_err(|source| PackError::source(path, source))?;
    if file
        .metadata()
        .map_err(|source| io("read", source))?
        .is_dir()
    {
        return Err(PackError::UnusableSource {
            path: path.to_owned(),
            why: "it is a directory; use dir:PATH for directories",
        });
    }
    let mut input = decode(file, path, max_ratio)?;
    input.lazy = lazy::is_lazy_file(path);
    Ok(input)
}

/// Whether what is at `path` can be opened again from its beginning: not a pipe.
pub(crate) fn can_be_read_twice(path: &Path) -> bool {
    match path == Path::new(STDIN) {
        true => stdin::file().is_some(),
        false => fs_err::metadata(path).is_ok_and(|file| file.is_file()),
    }
}

/// The uncompressed bytes of `input`, which is called `path` in messages.
pub(crate) fn decode(
    input: impl Read + Send + 'static,
    path: &Path,
    max_ratio: u64,
) -> Result<Input> {
    let io = |action, source| PackError::io(action, path.display().to_string(), source);
    let (mut input, watch) = Watched::new(input);
    let mut start = Vec::new();
    // Pipes may give them one by one.
    (&mut input)
        .take(MAGIC)
        .read_to_end(&mut start)
        .map_err(|source| io("read", source))?;
    if start.is_empty() {
        return Err(PackError::UnusableSource {
            path: path.to_owned(),
            why: "it is empty, which no archive is",
        });
    }
    let head = start.clone();
    let input = BufReader::with_capacity(BUFFER, Cursor::new(start).chain(input));
    // A zstd archive may begin with a skippable frame.
    let skippable = matches!(*head, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]);
    let reader: Box<dyn Read + Send> = if head.starts_with(GZIP) {
        Box::new(Gzip::new(input))
    } else if head.starts_with(ZSTD) || skippable {
        let decoder = zstd::stream::read::Decoder::with_buffer(input);
        Box::new(decoder.map_err(|source| io("decompress", source))?)
    } else if head.starts_with(XZ) {
        let stream = Stream::new_stream_decoder(XZ_MEMORY, CONCATENATED);
        let stream = stream.map_err(|error| io("decompress", error.into()))?;
        Box::new(XzDecoder::new_stream(input, stream))
    } else if head.starts_with(BZIP2) {
        Box::new(MultiBzDecoder::new(input))
    } else {
        // Not compressed: there is no ratio.
        return Ok(Input {
            reader: Box::new(input),
            lazy: false,
            watch,
        });
    };
    let bounded = Bounded::new(reader, watch.clone(), path.display().to_string(), max_ratio);
    Ok(Input {
        reader: Box::new(BufReader::with_capacity(BUFFER, bounded)),
        lazy: false,
        watch,
    })
}

//! Opens an archive file: plain, gzip (one or many members) or zstd (one or many frames), told
//! apart by the first bytes.
//!
//! Input that ends early, and input that goes on after the compressed data, are errors; zero bytes
//! after a gzip member are padding, as `gzip` takes them.

use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::bufread::GzDecoder;

use crate::error::{PackError, Result};

const GZIP: [u8; 2] = [0x1f, 0x8b];
const ZSTD: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Compressed input is read in pieces of this size.
const BUFFER: usize = 256 << 10;

/// Opens the archive at `path` and hands out its uncompressed bytes.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Read + Send>> {
    let io = |action, source| PackError::io(action, path.display().to_string(), source);
    let file = fs_err::File::open(path).map_err(|source| io("open", source))?;
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
    decode(file, path)
}

/// The uncompressed bytes of `input`, which is called `path` in messages.
pub(crate) fn decode(
    input: impl Read + Send + 'static,
    path: &Path,
) -> Result<Box<dyn Read + Send>> {
    let io = |action, source| PackError::io(action, path.display().to_string(), source);
    let mut input = BufReader::with_capacity(BUFFER, input);
    let start = peek(&mut input, 6).map_err(|source| io("read", source))?;
    if start.starts_with(&GZIP) {
        return Ok(Box::new(BufReader::with_capacity(BUFFER, Gzip::new(input))));
    }
    // A zstd archive may begin with a skippable frame.
    let skippable = matches!(start, [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..]);
    if start.starts_with(&ZSTD) || skippable {
        let decoder = zstd::stream::read::Decoder::with_buffer(input)
            .map_err(|source| io("decompress", source))?;
        return Ok(Box::new(BufReader::with_capacity(BUFFER, decoder)));
    }
    let why = match start {
        [0xfd, b'7', b'z', b'X', b'Z', 0] => "it is compressed with xz; decompress it first",
        [b'B', b'Z', b'h', ..] => "it is compressed with bzip2; decompress it first",
        [] => "it is empty, which no archive is",
        _ => return Ok(Box::new(input)),
    };
    Err(PackError::UnusableSource {
        path: path.to_owned(),
        why,
    })
}

/// The first `n` bytes of what is to be read, or fewer where the input ends.
fn peek<R: Read>(input: &mut BufReader<R>, n: usize) -> io::Result<&[u8]> {
    // A first read may be short only on pipes; the magic is what fits in it.
    loop {
        match input.fill_buf() {
            Ok(_) => break,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let bytes = input.buffer();
    Ok(bytes.get(..n.min(bytes.len())).unwrap_or_default())
}

/// All members of a gzip file, one after the other.
struct Gzip<R> {
    state: State<R>,
}

enum State<R> {
    Member(Box<GzDecoder<R>>),
    Done,
}

impl<R: BufRead> Gzip<R> {
    fn new(input: R) -> Self {
        Self {
            state: State::Member(Box::new(GzDecoder::new(input))),
        }
    }
}

impl<R: BufRead> Read for Gzip<R> {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        if out.is_empty() {
            return Ok(0);
        }
        loop {
            let State::Member(decoder) = &mut self.state else {
                return Ok(0);
            };
            let n = decoder.read(out)?;
            if n > 0 {
                return Ok(n);
            }
            let State::Member(decoder) = std::mem::replace(&mut self.state, State::Done) else {
                return Ok(0);
            };
            let mut input = decoder.into_inner();
            match input.fill_buf()?.first() {
                None => {}
                Some(0) => only_zeros(&mut input)?,
                Some(_) => self.state = State::Member(Box::new(GzDecoder::new(input))),
            }
        }
    }
}

fn only_zeros(input: &mut impl BufRead) -> io::Result<()> {
    loop {
        let bytes = input.fill_buf()?;
        if bytes.is_empty() {
            return Ok(());
        }
        if bytes.iter().any(|&byte| byte != 0) {
            return Err(io::Error::new(
                io::ErrorKind::InvalidData,
                "data that is not gzip follows the last member",
            ));
        }
        let n = bytes.len();
        input.consume(n);
    }
}

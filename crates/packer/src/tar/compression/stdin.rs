//! Standard input, if it is a file: that can be read as often as it takes.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;

/// A file from where it was when it was handed over. Whoever else has it open does not see that it is
/// read: its position stays.
#[derive(Debug)]
pub(super) struct Standing {
    file: File,
    at: u64,
}

/// Standard input; `None`: it is a pipe or the like.
pub(super) fn file() -> Option<Standing> {
    from(io::stdin())
}

fn from(input: impl AsFd) -> Option<Standing> {
    let file = File::from(input.as_fd().try_clone_to_owned().ok()?);
    if !file.metadata().ok()?.is_file() {
        return None;
    }
    let at = rustix::fs::tell(&file).ok()?;
    Some(Standing { file, at })
}

impl Read for Standing {
    fn read(&mut self, out: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read_at(out, self.at)?;
        self.at += read as u64;
        Ok(read)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Seek, SeekFrom, Write};

    use super::*;

    #[test]
    fn a_file_is_read_from_where_it_stands_as_often_as_wanted() {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(b"before what is meant").unwrap();
        file.seek(SeekFrom::Start(7)).unwrap();
        for _ in 0..2 {
            let mut text = String::new();
            from(&file).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, "what is meant");
        }
        let (reader, _writer) = io::pipe().unwrap();
        assert!(from(&reader).is_none());
    }
}

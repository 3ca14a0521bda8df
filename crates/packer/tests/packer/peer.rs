//! An image as an independent reader of the format finds it, against the kernel's view.

use std::collections::HashMap;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use erofs_rs::EroFS;
use erofs_rs::backend::SliceImage;
use layerpack_fixtures::treecmp::{Entry, Options, TreeSnapshot, diff, snapshot};
use rustix::fs::FileType;

/// Largest file whose bytes are compared; of others a few places are.
const WHOLE: u64 = 4 << 20;

/// Checks that the reader finds in `image` (with `devices`) what is mounted at `mounted`: names,
/// metadata, attributes, links, contents.
#[track_caller]
pub fn assert_same_as_mounted(image: &[u8], devices: &[&[u8]], mounted: &Path) {
    let devices = devices.iter().map(|data| SliceImage::new(data)).collect();
    let fs = EroFS::new_with_devices(SliceImage::new(image), devices).unwrap();
    let mut found = TreeSnapshot::default();
    let mut groups: HashMap<u64, Vec<Vec<u8>>> = HashMap::new();
    let root = fs.get_inode(fs.super_block().root_inode_id()).unwrap();
    let mut inodes = vec![(Vec::new(), root)];
    for item in fs.walk_dir("/").unwrap() {
        let item = item.unwrap();
        let path = item.dir_entry.path();
        let path = path.as_bytes();
        let path = path.strip_prefix(b"/").unwrap_or(path).to_vec();
        if !matches!(path.rsplit(|byte| *byte == b'/').next(), Some(b"." | b"..")) {
            inodes.push((path, item.inode));
        }
    }
    for (path, inode) in inodes {
        use std::os::unix::fs::PermissionsExt as _;
        let kind = FileType::from_raw_mode(inode.file_type().as_raw_mode());
        let is_dir = kind == FileType::Directory;
        let mut entry = Entry {
            kind,
            mode: inode.permissions().mode() & 0o7777,
            uid: inode.uid(),
            gid: inode.gid(),
            size: 0,
            mtime: inode.modified_unix(),
            xattrs: fs.xattrs_inode(inode).unwrap(),
            nlink: if is_dir { 0 } else { inode.nlink() },
            link_group: None,
            rdev: inode.device().unwrap_or_default(),
            target: None,
            digest: None,
        };
        if !is_dir {
            groups.entry(inode.id()).or_default().push(path.clone());
        }
        if inode.is_symlink() {
            entry.size = inode.data_size();
            entry.target = Some(fs.read_link_inode(inode).unwrap().as_bytes().to_vec());
        } else if inode.is_file() {
            entry.size = inode.data_size();
            let file = fs.open_inode_file(inode).unwrap();
            let mut there = open(mounted, &path);
            let places = if entry.size <= WHOLE {
                vec![(0, entry.size)]
            } else {
                vec![(0, 5000), (entry.size / 2, 5000), (entry.size - 5000, 5000)]
            };
            for (at, len) in places {
                let mut bytes = vec![0; usize::try_from(len).unwrap()];
                let mut filled = 0;
                while filled < bytes.len() {
                    let n = file
                        .read_at(&mut bytes[filled..], at + filled as u64)
                        .unwrap();
                    assert!(n > 0, "{} ends early", String::from_utf8_lossy(&path));
                    filled += n;
                }
                let mut expected = vec![0; bytes.len()];
                std::io::Seek::seek(&mut there, std::io::SeekFrom::Start(at)).unwrap();
                there.read_exact(&mut expected).unwrap();
                assert!(bytes == expected, "{}", String::from_utf8_lossy(&path));
            }
        }
        found.entries.insert(path, entry);
    }
    for mut paths in groups.into_values().filter(|paths| paths.len() > 1) {
        paths.sort();
        for path in &paths {
            found.entries.get_mut(path).unwrap().link_group = Some(paths[0].clone());
        }
    }
    let options = Options {
        contents: false,
        ..Options::default()
    };
    let differences = diff(&snapshot(mounted, &options).unwrap(), &found);
    assert!(
        differences.is_empty(),
        "{:#?}",
        &differences[..differences.len().min(12)]
    );
}

/// Opens a file by a path of any length.
fn open(root: &Path, path: &[u8]) -> std::fs::File {
    use rustix::fs::{Mode, OFlags, openat};
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let mut dir = rustix::fs::open(root, flags, Mode::empty()).unwrap();
    for name in path.split(|byte| *byte == b'/') {
        dir = openat(
            &dir,
            std::ffi::OsStr::from_bytes(name),
            flags,
            Mode::empty(),
        )
        .unwrap();
    }
    std::fs::File::from(dir)
}

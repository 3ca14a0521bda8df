//! A root filesystem that is just big enough to run commands in: a shell, some tools, their
//! libraries, from this machine.

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use layerpack_fixtures::find_tool;

/// What goes into the root filesystem's /bin.
const TOOLS: [&str; 18] = [
    "sh", "cat", "ls", "touch", "mkdir", "rm", "mv", "ln", "chmod", "id", "stat", "sleep", "true",
    "dd", "chown", "mkfifo", "tty", "env",
];

/// Fills `root`; gives the number of bytes of its files.
pub(crate) fn make(root: &Path) -> u64 {
    for (dir, mode) in [
        ("bin", 0o755),
        ("etc", 0o755),
        ("root", 0o700),
        ("tmp", 0o1777),
        ("usr", 0o755),
        ("var/data", 0o750),
    ] {
        let path = root.join(dir);
        fs_err::create_dir_all(&path).unwrap();
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    }
    let mut bytes = 0;
    for tool in TOOLS {
        bytes += add(root, tool);
    }
    fs_err::write(
        root.join("etc/passwd"),
        "root:x:0:0:root:/root:/bin/sh\nworker:x:1000:1000::/tmp:/bin/sh\n",
    )
    .unwrap();
    fs_err::write(root.join("etc/group"), "root:x:0:\nworker:x:1000:\n").unwrap();
    symlink("bin/sh", root.join("shell")).unwrap();
    bytes
}

/// Adds a program of this machine with its libraries to /bin; gives the number of their bytes.
pub(crate) fn add(root: &Path, tool: &str) -> u64 {
    let program = find_tool(tool).unwrap_or_else(|| panic!("{tool} is missing on this machine"));
    let real = fs_err::canonicalize(&program).unwrap();
    copy(&real, &root.join("bin").join(tool)) + add_libraries(root, &program)
}

/// Adds the libraries of a program; gives the number of their bytes.
pub(crate) fn add_libraries(root: &Path, program: &Path) -> u64 {
    let mut bytes = 0;
    for library in libraries(program) {
        let target = root.join(library.strip_prefix("/").unwrap());
        if !target.exists() {
            fs_err::create_dir_all(target.parent().unwrap()).unwrap();
            bytes += copy(&fs_err::canonicalize(&library).unwrap(), &target);
        }
    }
    bytes
}

fn copy(from: &Path, to: &Path) -> u64 {
    fs_err::copy(from, to).unwrap()
}

/// The shared objects that a program needs, with the loader.
fn libraries(program: &Path) -> Vec<PathBuf> {
    let output = Command::new("ldd").arg(program).output().unwrap();
    String::from_utf8(output.stdout)
        .unwrap()
        .lines()
        .filter_map(|line| line.split_whitespace().find(|word| word.starts_with('/')))
        .map(PathBuf::from)
        .collect()
}

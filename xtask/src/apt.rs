//! Debian packages, through the machine's own sources.
//!
//! Only the machine's sources of its own Debian release are used, so that a third party's broken
//! repository breaks nothing here, and so that no mirror is named in this program. Both formats
//! are read: one-line `*.list` and deb822 `*.sources` (`sources.list(5)`).

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::process;

/// One archive: where, which suite, which key signs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    uri: String,
    suite: String,
    signed_by: Option<String>,
}

impl Source {
    /// As a line of `sources.list`, with the component `main` alone.
    pub(crate) fn line(&self) -> String {
        let option = self
            .signed_by
            .as_ref()
            .map_or_else(String::new, |key| format!("[signed-by={key}] "));
        format!("deb {option}{} {} main", self.uri, self.suite)
    }
}

/// The machine's release name, such as `bookworm`.
///
/// # Errors
/// When the machine is not a Debian one.
pub(crate) fn codename() -> Result<String> {
    let text = fs_err::read_to_string("/etc/os-release")?;
    let field = |key: &str| {
        text.lines()
            .find_map(|line| line.strip_prefix(key)?.strip_prefix('='))
            .map(|value| value.trim_matches('"').to_owned())
    };
    if field("ID").as_deref() != Some("debian") {
        bail!("this needs a Debian machine: /etc/os-release does not say ID=debian");
    }
    field("VERSION_CODENAME").context("/etc/os-release names no VERSION_CODENAME")
}

/// The machine's sources of its own release: the suite itself, its updates and security.
///
/// # Errors
/// When there are none.
pub(crate) fn sources() -> Result<Vec<Source>> {
    let codename = codename()?;
    let mut files = vec![PathBuf::from("/etc/apt/sources.list")];
    if let Ok(listing) = fs_err::read_dir("/etc/apt/sources.list.d") {
        files.extend(listing.filter_map(Result::ok).map(|entry| entry.path()));
    }
    files.sort();
    let mut found: Vec<Source> = Vec::new();
    for file in files {
        let extension = file.extension().and_then(|extension| extension.to_str());
        let Ok(text) = fs_err::read_to_string(&file) else {
            continue;
        };
        let sources = match extension {
            Some("list") => parse_list(&text, &codename),
            Some("sources") => parse_deb822(&text, &codename),
            _ => continue,
        };
        for source in sources {
            if !found.contains(&source) {
                found.push(source);
            }
        }
    }
    if !found.iter().any(|source| source.suite == codename) {
        bail!("no source of Debian {codename} main in /etc/apt/sources.list or sources.list.d");
    }
    Ok(found)
}

/// Debian's own: the release's suites, component main, and if a key is named, Debian's.
fn wanted(suite: &str, components: &[&str], signed_by: Option<&str>, codename: &str) -> bool {
    let suites = ["", "-updates", "-security"].map(|suffix| format!("{codename}{suffix}"));
    suites.iter().any(|known| known == suite)
        && components.contains(&"main")
        && signed_by.is_none_or(|key| key.contains("debian-archive"))
}

fn parse_list(text: &str, codename: &str) -> Vec<Source> {
    let mut found = Vec::new();
    for line in text.lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        let Some(rest) = line
            .strip_prefix("deb ")
            .or_else(|| line.strip_prefix("deb\t"))
        else {
            continue;
        };
        let rest = rest.trim_start();
        let (options, rest) = match rest.strip_prefix('[') {
            Some(rest) => rest.split_once(']').unwrap_or((rest, "")),
            None => ("", rest),
        };
        let signed_by = options
            .split_whitespace()
            .find_map(|option| option.strip_prefix("signed-by="))
            .map(str::to_owned);
        let mut fields = rest.split_whitespace();
        let (Some(uri), Some(suite)) = (fields.next(), fields.next()) else {
            continue;
        };
        let components: Vec<&str> = fields.collect();
        if wanted(suite, &components, signed_by.as_deref(), codename) {
            found.push(Source {
                uri: uri.to_owned(),
                suite: suite.to_owned(),
                signed_by,
            });
        }
    }
    found
}

fn parse_deb822(text: &str, codename: &str) -> Vec<Source> {
    let mut found = Vec::new();
    // Comments may stand between the lines of one stanza: take them out before looking for ends.
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    for stanza in lines.split(|line| line.trim().is_empty()) {
        let field = |name: &str| -> Option<Vec<&str>> {
            let mut values = None;
            for line in stanza {
                if line.starts_with([' ', '\t']) {
                    if let Some(values) = &mut values {
                        Vec::extend(values, line.split_whitespace());
                    }
                    continue;
                }
                if values.is_some() {
                    break;
                }
                if let Some((key, value)) = line.split_once(':')
                    && key.trim().eq_ignore_ascii_case(name)
                {
                    values = Some(value.split_whitespace().collect());
                }
            }
            values
        };
        let disabled = field("Enabled").is_some_and(|value| value == ["no"] || value == ["false"]);
        if disabled || !field("Types").unwrap_or_default().contains(&"deb") {
            continue;
        }
        // A key may also be written into the stanza itself; Debian's own sources name a file.
        let keys = field("Signed-By").unwrap_or_default();
        let signed_by = keys.first().map(|key| (*key).to_owned());
        let components = field("Components").unwrap_or_default();
        for uri in field("URIs").unwrap_or_default() {
            for suite in field("Suites").unwrap_or_default() {
                if wanted(suite, &components, signed_by.as_deref(), codename) {
                    found.push(Source {
                        uri: uri.to_owned(),
                        suite: suite.to_owned(),
                        signed_by: signed_by.clone(),
                    });
                }
            }
        }
    }
    found
}

/// Writes the machine's own sources as one `sources.list`.
///
/// # Errors
/// As [`sources`], or when the file cannot be written.
pub(crate) fn write_sources(path: &Path) -> Result<()> {
    let lines: Vec<String> = sources()?.iter().map(Source::line).collect();
    fs_err::write(path, lines.join("\n") + "\n")?;
    Ok(())
}

/// `apt-get` that reads the sources in the file `sources` only, and asks nothing.
pub(crate) fn get(sources: &Path) -> Command {
    let mut command = Command::new("apt-get");
    command
        .arg(format!("-oDir::Etc::SourceList={}", sources.display()))
        .args(["-oDir::Etc::SourceParts=-", "-oAPT::Get::List-Cleanup=0"])
        .args(["-oDPkg::Lock::Timeout=300", "-oAcquire::Retries=3", "-qq"])
        .env("DEBIAN_FRONTEND", "noninteractive");
    command
}

/// Whether dpkg has the package installed.
pub(crate) fn installed(package: &str) -> bool {
    let mut command = Command::new("dpkg-query");
    command.args(["-W", "-f=${db:Status-Status}", package]);
    command
        .output()
        .is_ok_and(|output| output.status.success() && output.stdout == b"installed")
}

/// Installs packages with apt-get, through sudo if this is not root.
///
/// # Errors
/// When apt-get fails, or neither root nor sudo is at hand.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    let list = packages.join(" ");
    let scratch = std::env::temp_dir().join(format!("layerpack-apt-{}", std::process::id()));
    let outcome = write_sources(&scratch).and_then(|()| {
        println!("     installing Debian packages: {list}");
        process::quietly(&mut as_root(get(&scratch).arg("update"))?)?;
        let mut command = get(&scratch);
        command
            .args(["install", "-y", "--no-install-recommends"])
            .args(packages);
        process::quietly(&mut as_root(&command)?)
    });
    let _ = fs_err::remove_file(&scratch);
    outcome.with_context(|| {
        format!("cannot install {list}; as root, `apt-get install {list}` does it by hand")
    })
}

/// The same command, behind sudo unless this is root.
///
/// # Errors
/// When there is no sudo either.
fn as_root(command: &Command) -> Result<Command> {
    let mut same = if layerpack_fixtures::is_root() {
        Command::new(command.get_program())
    } else if layerpack_fixtures::find_tool("sudo").is_some() {
        let mut sudo = Command::new("sudo");
        sudo.arg("DEBIAN_FRONTEND=noninteractive")
            .arg(command.get_program());
        sudo
    } else {
        bail!("this needs root, and there is no sudo");
    };
    same.args(command.get_args());
    for (key, value) in command.get_envs() {
        if let Some(value) = value {
            same.env(key, value);
        }
    }
    Ok(same)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(sources: &[Source]) -> Vec<String> {
        sources.iter().map(Source::line).collect()
    }

    #[test]
    fn one_line_sources() {
        let text = "\
# deb http://commented.example/debian bookworm main
deb http://mirror.example/debian bookworm main contrib # tail
deb-src http://mirror.example/debian bookworm main
deb [arch=amd64 signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://m.example/s bookworm-security main
deb [signed-by=/usr/share/keyrings/vendor.gpg] http://vendor.example bookworm main
deb http://vendor.example bookworm stable
deb http://vendor.example nodistro main
deb http://mirror.example/debian trixie main
deb broken
";
        assert_eq!(
            lines(&parse_list(text, "bookworm")),
            [
                "deb http://mirror.example/debian bookworm main",
                "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://m.example/s bookworm-security main",
            ]
        );
    }

    #[test]
    fn deb822_sources() {
        let text = "\
Types: deb deb-src
# a comment within
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
 contrib
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://off.example/debian
Suites: bookworm
Components: main
Enabled: no

Types: deb
URIs: http://vendor.example
Suites: bookworm
Components: main
Signed-By: /usr/share/keyrings/vendor.gpg

Types: deb-src
URIs: http://mirror.example/debian
Suites: bookworm
Components: main
";
        let key = "[signed-by=/usr/share/keyrings/debian-archive-keyring.gpg]";
        assert_eq!(
            lines(&parse_deb822(text, "bookworm")),
            [
                format!("deb {key} http://mirror.example/debian bookworm main"),
                format!("deb {key} http://mirror.example/debian bookworm-updates main"),
            ]
        );
    }
}

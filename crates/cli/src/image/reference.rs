//! Names of images: `registry.example.com:5000/team/zoo:v1`.

use std::fmt;
use std::str::FromStr;

/// A name with a tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Reference {
    /// The registry; none means Docker's own.
    registry: Option<String>,
    /// The repository in it.
    repository: String,
    tag: String,
}

/// The registry of names that say none.
const DOCKER_HUB: &str = "docker.io";
const TAG_BYTES_MAX: usize = 128;

impl Reference {
    /// The tag.
    pub fn tag(&self) -> &str {
        &self.tag
    }

    /// The registry as people name it.
    pub fn registry(&self) -> &str {
        self.registry.as_deref().unwrap_or(DOCKER_HUB)
    }

    /// The repository as the registry knows it: Docker's own keeps names without a team below `library/`.
    pub fn repository(&self) -> String {
        if self.registry() == DOCKER_HUB && !self.repository.contains('/') {
            return format!("library/{}", self.repository);
        }
        self.repository.clone()
    }

    /// With everything that people may leave out.
    pub fn qualified(&self) -> String {
        format!("{}/{}:{}", self.registry(), self.repository(), self.tag)
    }

    /// The same repository and tag in another registry.
    pub fn at(&self, registry: &str) -> Reference {
        Reference { registry: Some(registry.into()), ..self.clone() }
    }

    /// The file that an image of this name is kept in where nobody says another one.
    pub fn file_name(&self) -> String {
        let last = self.repository.rsplit('/').next().unwrap_or(&self.repository);
        format!("{last}-{}.tar", self.tag)
    }
}

impl fmt::Display for Reference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(registry) = &self.registry {
            write!(f, "{registry}/")?;
        }
        write!(f, "{}:{}", self.repository, self.tag)
    }
}

impl FromStr for Reference {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text.contains('@') {
            return Err("an image is named by a tag here, not by a digest".into());
        }
        let (registry, rest) = match text.split_once('/') {
            Some((first, rest)) if first.contains(['.', ':']) || first == "localhost" => (Some(first), rest),
            _ => (None, text),
        };
        let (repository, tag) = rest.split_once(':').unwrap_or((rest, "latest"));
        if let Some(registry) = registry {
            check_registry(registry)?;
        }
        if let Some(part) = repository.split('/').find(|part| !is_name(part)) {
            return Err(format!(
                "{part:?} cannot be a part of an image's name: small letters and digits, with . _ - between them"
            ));
        }
        let first = tag.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric() || b == b'_');
        let rest = tag.bytes().all(|b| b.is_ascii_alphanumeric() || b"_.-".contains(&b));
        if !first || !rest || tag.len() > TAG_BYTES_MAX {
            return Err(format!("{tag:?} is no tag: letters, digits, _ . -, at most {TAG_BYTES_MAX}"));
        }
        // Docker's own registry is left out again, and `library/` with it, as people write these names.
        let registry = registry.map(String::from).filter(|name| name != DOCKER_HUB);
        let alone = repository.strip_prefix("library/").filter(|_| registry.is_none());
        Ok(Reference { registry, repository: alone.unwrap_or(repository).into(), tag: tag.into() })
    }
}

/// Fails where something is not HOST or HOST:PORT.
pub fn check_registry(text: &str) -> Result<(), String> {
    let (host, port) = text.split_once(':').map_or((text, None), |(host, port)| (host, Some(port)));
    let plain = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_alphanumeric());
    let inner = host.bytes().all(|b| plain(Some(b)) || b".-".contains(&b)) && !host.contains("..");
    let named = plain(host.bytes().next()) && plain(host.bytes().last()) && inner;
    let numbered = port.is_none_or(|port| port.parse::<u16>().is_ok());
    if named && numbered {
        Ok(())
    } else {
        Err(format!("{text:?} is no registry: write it as HOST or HOST:PORT"))
    }
}

/// Small letters and digits, with separators between them.
fn is_name(part: &str) -> bool {
    let plain = |b: Option<u8>| b.is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    let inner = part.bytes().all(|b| plain(Some(b)) || b"._-".contains(&b));
    let separated = !part.contains("..") && !part.contains("___");
    plain(part.bytes().next()) && plain(part.bytes().last()) && inner && separated
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_completed_as_docker_completes_them() {
        let cases = [
            ("zoo", "zoo:latest", "docker.io/library/zoo:latest", "zoo-latest.tar"),
            ("team/zoo:v1", "team/zoo:v1", "docker.io/team/zoo:v1", "zoo-v1.tar"),
            ("docker.io/zoo:v1", "zoo:v1", "docker.io/library/zoo:v1", "zoo-v1.tar"),
            ("localhost/zoo", "localhost/zoo:latest", "localhost/zoo:latest", "zoo-latest.tar"),
            (
                "reg.example.com:5000/a/b:1.2-rc_3",
                "reg.example.com:5000/a/b:1.2-rc_3",
                "reg.example.com:5000/a/b:1.2-rc_3",
                "b-1.2-rc_3.tar",
            ),
        ];
        for (text, shown, qualified, file) in cases {
            let name: Reference = text.parse().unwrap();
            assert_eq!(name.to_string(), shown);
            assert_eq!(name.qualified(), qualified);
            assert_eq!(name.file_name(), file);
        }
        let moved = "team/zoo:v1".parse::<Reference>().unwrap().at("localhost:5000");
        assert_eq!(moved.to_string(), "localhost:5000/team/zoo:v1");
        let alone = "docker.io/library/zoo:v1".parse::<Reference>().unwrap();
        assert_eq!(
            (alone.to_string().as_str(), alone.at("reg.io").to_string().as_str()),
            ("zoo:v1", "reg.io/zoo:v1")
        );
    }

    #[test]
    fn what_registries_would_refuse_is_refused_here() {
        for wrong in [
            "",
            "Zoo",
            "zoo:",
            "zoo:a b",
            "a//b",
            "-zoo",
            "zoo-",
            "a..b",
            "../etc",
            "reg.io:port/zoo",
            "zoo@sha256:00",
            "zoo:.v1",
        ] {
            assert!(wrong.parse::<Reference>().is_err(), "{wrong:?}");
        }
        assert!(format!("zoo:{}", "1".repeat(129)).parse::<Reference>().is_err());
    }
}

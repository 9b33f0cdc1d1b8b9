//! Words in a JSON document: base64 of their bytes, the lowest first.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::de::Error;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Some words.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Words(pub Vec<u64>);

impl Words {
    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Words {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        let bytes: Vec<u8> = self.0.iter().flat_map(|word| word.to_le_bytes()).collect();
        to.serialize_str(&STANDARD.encode(bytes))
    }
}

impl<'de> Deserialize<'de> for Words {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        let text = std::borrow::Cow::<str>::deserialize(from)?;
        let bytes = STANDARD.decode(text.as_bytes()).map_err(D::Error::custom)?;
        let (words, rest) = bytes.as_chunks();
        match rest {
            [] => Ok(Words(words.iter().map(|word| u64::from_le_bytes(*word)).collect())),
            _ => Err(D::Error::custom("words of eight bytes are not whole")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_come_back_and_half_ones_are_refused() {
        let words = Words(vec![0, 1, u64::MAX, 0x0102_0304_0506_0708]);
        let json = serde_json::to_string(&words).unwrap();
        assert_eq!(serde_json::from_str::<Words>(&json).unwrap(), words);
        assert_eq!(serde_json::from_str::<Words>("\"\"").unwrap(), Words::default());
        assert!(serde_json::from_str::<Words>("\"AAAA\"").is_err());
        assert!(serde_json::from_str::<Words>("\"!\"").is_err());
    }
}

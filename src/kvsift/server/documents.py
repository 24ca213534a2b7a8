"""Documents that clients have uploaded, from the server's side: their texts, and the progress of their prefill.

They outlive the engine process: the next one prefills them again.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Collection, Sequence
from hashlib import blake2b
from typing import Any

from kvsift.server.api_errors import ApiError
from kvsift.server.document_files import DocumentFiles
from kvsift.server.served_document import ServedDocument

MOST_DOCUMENTS = 64  # of one API key
MOST_OF_ALL = 256
MOST_CHARACTERS = 128 << 20  # of all documents
NO_FOLDER = "this server keeps no documents between starts; it would with --documents."
ENGINE_LOST = "the engine process died while it read this document alone, which is not tried again."


class Documents:
    """All documents of a server.

    Args:
        send: a message to the engine, if there is one at the moment; returns whether there is.
        files: where they are kept between starts; None: nowhere.
        salts: salts of the API keys; kept documents of other keys stay on the disk.
    """

    def __init__(
        self, send: Callable[[dict[str, Any]], bool], files: DocumentFiles | None = None, salts: Sequence[str] = ("",)
    ) -> None:
        self._send, self._files = send, files
        self._documents: dict[str, ServedDocument] = {}
        num_others = 0
        for kept in files.load() if files is not None else ():
            document = ServedDocument(**kept)
            if document.owner[1] in salts:
                self._documents[document.key] = document
            else:
                num_others += 1
        if num_others:
            print(f"kvsift: documents of other API keys, which stay on the disk: {num_others}.", file=sys.stderr)

    def of(self, owner: tuple[str, str]) -> list[ServedDocument]:
        """The documents of an API key, newest last."""
        return [document for document in self._documents.values() if document.owner[1] == owner[1]]

    def get(self, key: str, owner: tuple[str, str]) -> ServedDocument:
        """Return a document.

        Raises:
            ApiError: 404 if it is not there, or another key's.
        """
        document = self._documents.get(key)
        if document is None or document.owner[1] != owner[1]:
            raise ApiError(404, f"there is no document {key[:80]!r}.", "document_not_found", "document")
        return document

    def check_room(self, owner: tuple[str, str]) -> None:
        """Refuse an upload beyond the number of documents (``ApiError``)."""
        if len(self.of(owner)) >= MOST_DOCUMENTS or len(self._documents) >= MOST_OF_ALL:
            most = MOST_DOCUMENTS if len(self.of(owner)) >= MOST_DOCUMENTS else MOST_OF_ALL
            raise ApiError(400, f"there are {most} documents already. Delete one first.", "too_many_documents")

    def add(self, name: str, text: str, num_bytes: int, owner: tuple[str, str]) -> ServedDocument:
        """Return the document of a text, which the engine prefills unless the key has it already.

        Raises:
            ApiError: if there are too many, or too long ones.
        """
        key = key_of(text.encode(), owner[1])
        if (known := self._documents.get(key)) is not None and known.status != "failed":
            if not known.kept:  # there may be room now
                self._keep(known)
            return known
        if known is None:
            self.check_room(owner)
        held = sum(len(document.text) for document in self._documents.values())
        if held + len(text) > MOST_CHARACTERS:
            text = (
                f"the documents of this server have {held:,} characters, of at most {MOST_CHARACTERS:,}. Delete some."
            )
            raise ApiError(400, text, "too_many_documents")
        document = self._put(ServedDocument(key, name, text, owner, num_bytes))
        self._keep(document)
        self._prefill(document)
        return document

    def add_failed(self, name: str, data: bytes, owner: tuple[str, str], error: str) -> ServedDocument:
        """Return the document of a file without text."""
        key = key_of(data, owner[1])
        if key not in self._documents:
            self.check_room(owner)
        document = ServedDocument(key, name, "", owner, len(data), status="failed", pinned=False, error=error)
        document.why_not_kept = "it has no text."
        return self._put(document)

    def _keep(self, document: ServedDocument) -> None:
        """Let a document stay between starts, or say why it does not."""
        if self._files is None:
            document.why_not_kept = NO_FOLDER
        else:
            self._files.save(document)

    def _prefill(self, document: ServedDocument) -> None:
        """Let the engine prefill a document."""
        kept = None if self._files is None else str(self._files.kept(document.key))
        document.is_sent = self._send({**document.message(), "kept": kept})

    def _put(self, document: ServedDocument) -> ServedDocument:
        self._documents.pop(document.key, None)
        self._documents[document.key] = document
        return document

    def delete(self, document: ServedDocument) -> None:
        """Forget a document; questions that wait for it fail."""
        self._documents.pop(document.key, None)
        if self._files is not None:
            self._files.delete(document.key)
        self._send({"op": "forget", "document": document.key})
        document.update(status="failed", error="this document was deleted.")

    def received(self, message: dict[str, Any]) -> None:
        """Update a document with a message of the engine; if that fails, so has the document."""
        if (document := self._documents.get(message["document"])) is None or not document.text:
            return
        names = "status", "tokens", "num_prefilled", "pinned", "error"
        try:
            document.update(is_begun=True, **{name: message[name] for name in names if name in message})
        except Exception as error:
            traceback.print_exc()
            reason = f"the server failed ({type(error).__name__}); its log has the reason."
            document.update(status="failed", error=reason)
        document.crashes = 0 if document.status == "ready" else document.crashes
        if document.status == "failed" and document.crashes == 0:
            print(f"kvsift: document {document.key} cannot be read: {document.error}", file=sys.stderr)

    def resend(self, keys: Collection[str | None] | None = None) -> None:
        """Let a new engine process prefill all documents, or some, that it does not have."""
        for document in self._documents.values():
            is_asked = not document.is_sent and (keys is None or document.key in keys)
            if is_asked and document.text and document.status != "failed":
                document.update(status="reading", num_prefilled=0, pinned=True)
                self._prefill(document)

    @property
    def unread(self) -> dict[str, ServedDocument]:
        """Documents whose prefill has not ended."""
        return {key: each for key, each in self._documents.items() if each.status == "reading"}

    def crashed(self) -> list[ServedDocument]:
        """Count a crash of the engine; returns the documents that were in prefill. Where the engine has begun none, its
        message that it begins the first may have died with it."""
        sent = [document for document in self.unread.values() if document.is_sent]
        reading = [document for document in sent if document.is_begun] or sent[:1]
        for document in reading:
            document.crashes += 1
        for document in self._documents.values():
            document.is_sent = document.is_begun = False
        return reading


def key_of(data: bytes, salt: str) -> str:
    """Return the id of a document of an API key."""
    return "doc-" + blake2b(data, digest_size=12, key=salt.encode()[:64], person=b"kvsift-document"[:16]).hexdigest()

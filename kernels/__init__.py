"""The operations of a transformer layer over paged keys and values; nothing here knows of schedules or stores."""
